"""The table of transitions written out by hand, values in each state, and the bytes that a transport really carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.transport.base import Transport

_B, _F, _R, _D, _P = State

TABLE: dict[tuple[State, State], tuple[str, str, str]] = {
    (_B, _R): ("modulo", "all-gather of examples", "slice"),
    (_B, _D): ("modulo", "all-gather of examples", "reduce-scatter of examples"),
    (_F, _R): ("shard", "all-gather of features", "slice"),
    (_F, _D): ("shard", "all-gather of features", "reduce-scatter of features"),
    (_R, _D): ("copy_to_group", "identity", "all-reduce"),
    (_R, _B): ("slice_batch", "slice", "all-gather of examples"),
    (_R, _F): ("slice_features", "slice", "all-gather of features"),
    (_D, _B): ("slice_batch", "slice", "pad"),
    (_D, _F): ("slice_features", "slice", "pad"),
    (_B, _F): ("all_to_all", "all-to-all of examples", "all-to-all of features"),
    (_F, _B): ("all_to_all", "all-to-all of features", "all-to-all of examples"),
    (_P, _R): ("reduce_from_group", "all-reduce", "identity"),
    (_P, _D): ("reduce_from_group", "all-reduce", "all-reduce"),
    (_P, _B): ("reduce_scatter", "reduce-scatter of examples", "all-gather of examples"),
    (_P, _F): ("reduce_scatter", "reduce-scatter of features", "all-gather of features"),
}
"""(from, to) -> its node, and what forward and backward do."""

TRANSITIONS = [Transition(*ends) for ends in TABLE]


def fractions_sent(what: str, extents: Extents, index: int) -> float:
    """Return the fraction of a value's bytes that a rank sends, by what is done with it."""
    verb, _, parts = what.partition(" of ")
    rows, widths = _share(extents.rows, index), _share(extents.widths, index)
    own, other = (rows, widths) if parts == "examples" else (widths, rows)
    ranks = max(len(extents.rows), len(extents.widths))
    return {
        "all-gather": (ranks - 1) * own,
        "reduce-scatter": 1 - own,
        "all-reduce": 2 * (ranks - 1) / ranks,
        "all-to-all": own * (1 - other),
    }.get(verb, 0.0)


def _share(sizes: Sequence[int], index: int) -> float:
    return sizes[index] / sum(sizes) if sum(sizes) else 0.0


@dataclass(frozen=True)
class Case:
    """A value that one process has, and how a group divides it."""

    shape: tuple[int, ...]
    extents: Extents
    dtype: torch.dtype = torch.float64

    def value(self, seed: int) -> Tensor:
        """Some value of this shape."""
        numbers = torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return numbers.to(self.dtype)

    def held(self, whole: Tensor, state: State, index: int, seed: int = 0) -> Tensor:
        """What a rank holds of a value in some state; the terms of a sum are random."""
        match state:
            case State.BATCH:
                return whole.split(list(self.extents.rows), self.extents.dim)[index]
            case State.FEATURES:
                return whole.split(list(self.extents.widths), -1)[index]
            case State.PARTIAL:
                terms = [self.value(seed + 100 + k) for k in range(1, self.ranks)]
                return [whole - sum(terms, torch.zeros_like(whole)), *terms][index]
            case _:
                return whole

    @property
    def ranks(self) -> int:
        return max(len(self.extents.rows), len(self.extents.widths))


def cases(ranks: int, transition: Transition) -> list[Case]:
    """Values that a group divides evenly and not, with parts that are empty, in two dims and more."""
    uneven = tuple((5 * k + 3) % 4 + (k == 0) for k in range(ranks))
    widths = tuple((3 * k + 1) % 4 + (k == 1) for k in range(ranks))
    empty, last = (4, *[0] * (ranks - 1)), (*[0] * (ranks - 1), 3)
    found = [
        Case((2 * ranks, 3 * ranks), Extents((2,) * ranks, (3,) * ranks)),
        Case((sum(uneven), sum(widths)), Extents(uneven, widths)),
        Case((4, 3), Extents(empty, last)),
        Case((4, sum(widths)), Extents(empty, widths)),
        Case((0, ranks), Extents((0,) * ranks, (1,) * ranks)),
        Case((2, sum(uneven), sum(widths)), Extents(uneven, widths, 1)),  # the examples in the second dim
        Case((3 * sum(uneven), 2, sum(widths)), Extents(tuple(3 * n for n in uneven), widths)),  # 3 rows each
    ]
    if State.FEATURES not in transition:
        found += [Case((3, sum(uneven)), Extents(uneven, (), 1)), Case((sum(uneven),), Extents(uneven, ()))]
    return found + [Case(case.shape, case.extents, torch.float32) for case in found[:2]]


def count_sent(transport: Transport) -> list[float]:
    """The payload of every operation that `transport` starts from now on; a sum counts as on a ring."""
    sent: list[float] = []
    counts: dict[str, Callable[..., float]] = {
        "_isend": lambda tensor, dst, tag: tensor.nbytes,
        "_all_reduce": lambda tensor, ranks, maximum: 2 * (len(ranks) - 1) * tensor.nbytes / len(ranks),
        "_all_gather": lambda outputs, tensor, ranks: (len(ranks) - 1) * tensor.nbytes,
        "_reduce_scatter": lambda output, pieces, ranks: sum(
            piece.nbytes for piece, rank in zip(pieces, ranks, strict=True) if rank != transport.rank
        ),
    }
    for name, count in counts.items():
        start = getattr(transport, name)

        def counted(*arguments: Any, start: Any = start, count: Callable[..., float] = count) -> Any:
            sent.append(count(*arguments))
            return start(*arguments)

        setattr(transport, name, counted)
    return sent
