"""Which cells of a matrix of tests there are, and which of them run every day: the others run with all tests.

Of a large matrix all tests have every third of the others; with SPLITC_CELLS=all, `make test-cells`, each of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

_EVERY = 1 if os.environ.get("SPLITC_CELLS") == "all" else 3
_FEW = 3  # cells that always run


def thinned(cells: list[Any]) -> list[Any]:
    """Every third of many cells."""
    return cells if len(cells) <= _FEW else cells[::_EVERY]


def sampled(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    everyday: Collection[Any] = (),
    *,
    one_in: int = 0,
    whole: bool = False,
    ids: Callable[[Any], str] | None = None,
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` in which all cases are slow but those of `everyday`, or the first of every `one_in`.

    whole: each case is of a kind of its own, so that all tests have all of them.
    """
    cases = list(cases)
    everyday = cases[::one_in] if one_in else everyday
    assert everyday and all(case in cases for case in everyday), "the sample is empty, or not of these cases"
    others = [case for case in cases if case not in everyday]
    others = others if whole else thinned(others)
    cases = [case for case in cases if case in everyday or case in others]

    def cell(case: Any) -> Any:
        values = (case,) if isinstance(names, str) else case
        return pytest.param(*values, marks=() if case in everyday else pytest.mark.slow)

    return pytest.mark.parametrize(names, [cell(case) for case in cases], ids=ids)


def in_tiers(name: str, cases: Iterable[Any], *, one_in: int) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over two lists of cases: the first of every `one_in`, and the others, which are slow.

    For cases that take no longer than a test does by itself: the test walks through its list.
    """
    cases = list(cases)
    others = [case for place, case in enumerate(cases) if place % one_in]
    cells = [pytest.param(cases[::one_in], id="everyday"), pytest.param(others, id="others", marks=pytest.mark.slow)]
    return pytest.mark.parametrize(name, cells)


def in_pairs(everyday: int | None = None, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over few combinations in which each value of an axis meets each of any other axis.

    Of these the first `everyday` run every day, all where none is given.
    """
    dims = [list(each) for each in values.values()]

    def met(cell: tuple[int, ...]) -> set[Any]:
        return set(combinations(enumerate(cell), 2))

    cells = list(product(*map(_indices, dims)))
    left, chosen = set().union(*map(met, cells)), list[tuple[int, ...]]()
    while left:
        chosen.append(max(cells, key=lambda cell: len(left & met(cell))))
        left -= met(chosen[-1])
    return _cells(values, dims, chosen, everyday)


def along(everyday: int | None = None, **values: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over as many combinations as the longest axis has values, with each of every axis."""
    dims = [list(each) for each in values.values()]
    chosen = [tuple(k % len(dim) for dim in dims) for k in range(max(map(len, dims)))]
    return _cells(values, dims, chosen, everyday)


def _cells(names: Iterable[str], dims: list[list[Any]], cells: list[Any], everyday: int | None) -> pytest.MarkDecorator:
    marked = [
        pytest.param(
            *(dim[k] for dim, k in zip(dims, cell, strict=True)),
            marks=() if everyday is None or place < everyday else pytest.mark.slow,
        )
        for place, cell in enumerate(cells)
    ]
    return pytest.mark.parametrize(tuple(names), marked)


def _indices(values: list[Any]) -> range:
    return range(len(values))


def in_one(test: Callable[..., None]) -> Callable[[], None]:
    """One test of all cells of a parametrised one, where a cell takes next to no time."""
    ((names, cells),) = [mark.args for mark in test.pytestmark]  # type: ignore[attr-defined]
    names = [names] if isinstance(names, str) else names

    def run() -> None:
        for cell in cells:
            values = getattr(cell, "values", cell if len(names) > 1 else (cell,))
            given = dict(zip(names, values, strict=True))
            try:
                test(**given)
            except BaseException as error:
                error.add_note(f"with {given}")
                raise

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run
