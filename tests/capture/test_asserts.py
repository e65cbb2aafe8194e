"""Assertions on data: left out of the graph, with a note; tests of data anywhere else are refused.

PYTEST_DONT_REWRITE: the assert statements of the models below are to be Python's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from tests.support.capturing import captured, refusal
from tests.support.models import labels, made, vectors

Run = Callable[[Any, Tensor], Tensor]


def plain(m: Any, x: Tensor) -> Tensor:
    assert (x < 1e6).all()
    return m.fc(x)


def negated(m: Any, x: Tensor) -> Tensor:
    assert not torch.isnan(x).any(), "no numbers"
    return m.fc(x)


def several(m: Any, x: Tensor) -> Tensor:
    assert x.max() < 1e6 and not (x.isinf().any() or x.isnan().any())
    assert x.isnan().any() or (x.ndim == 2 and not x.min() > 1e6), f"{x.shape}"
    return m.fc(x)


def chained(m: Any, x: Tensor) -> Tensor:
    assert -1e6 < x.mean() < 1e6
    return m.fc(x)


def by_torch(m: Any, x: Tensor) -> Tensor:
    torch._assert((x < 1e6).all(), "too large")
    return m.fc(x)


def raised(m: Any, x: Tensor) -> Tensor:
    if x.ndim == 2 and x.max() >= 1e6:
        raise ValueError(f"too large: {x}")
    if not x.min() > -1e6 or x.isnan().any():
        raise ValueError("too small")
    elif x.isinf().any():
        raise ValueError("infinite")
    else:
        x = 2 * x
    return m.fc(x)


def raised_at_the_end_of_a_loop(m: Any, x: Tensor) -> Tensor:
    def check() -> None:
        for k in range(2):
            if x[:, k].max() > 1e6 and -1e6 < x.mean() < 1e6:
                raise ValueError

    check()
    return m.fc(x)


LEFT_OUT = (plain, negated, several, chained, by_torch, raised, raised_at_the_end_of_a_loop)


@pytest.mark.parametrize("run", LEFT_OUT, ids=lambda run: run.__name__)
def test_an_assertion_on_data_is_left_out_and_noted(run: Run) -> None:
    program = captured(made(run), vectors()(), labels()(), F.cross_entropy)
    assert program.notes and all(note.startswith("The assertion on ") for note in program.notes)


def test_an_assertion_on_constants_counts() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert m.flag > 0
        return m.fc(x)

    captured(made(run, flag=nn.Buffer(torch.ones(()))), vectors()(), labels()(), F.cross_entropy)
    said = refusal(made(run, flag=nn.Buffer(torch.zeros(()))), vectors()(), labels()(), F.cross_entropy)
    assert "AssertionError" in said


def in_a_branch(m: Any, x: Tensor) -> Tensor:
    if x.mean() > 0: assert x.ndim == 2; x = 2 * x  # fmt: skip  # noqa: E701, E702
    return m.fc(x)


def in_a_loop(m: Any, x: Tensor) -> Tensor:
    while x.mean() > 0:
        assert x.ndim == 2
        x = x - 1
    return m.fc(x)


def used_afterwards(m: Any, x: Tensor) -> Tensor:
    positive = x.mean() > 0
    assert positive
    return m.fc(x if positive else -x)


def raised_and_handled(m: Any, x: Tensor) -> Tensor:
    try:
        if x.mean() > 0:
            raise ValueError
    except ValueError:
        return m.fc(-x)
    return m.fc(x)


def raised_after_more(m: Any, x: Tensor) -> Tensor:
    if x.mean() > 0:
        m.seen = True
        raise ValueError
    return m.fc(x)


DECISIONS = (in_a_branch, in_a_loop, used_afterwards, raised_and_handled, raised_after_more)


@pytest.mark.parametrize("run", DECISIONS, ids=lambda run: run.__name__)
def test_a_test_of_data_that_is_no_assertion_is_refused(run: Run) -> None:
    model = made(run)
    assert Example.bind(model, vectors()(), labels()(), F.cross_entropy)
    assert "a branch needs the value of gt" in refusal(model, vectors()(), labels()(), F.cross_entropy)
