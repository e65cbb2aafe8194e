"""The microbatches of a step, called pieces: which examples each has, and how the examples of one are counted.

A piece is a part of every share of the batch, so its examples lie apart.  Counted within the piece they are contiguous
again, for every rank and for what any two ranks have in common: `positions` of a piece take the place of examples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Interval = tuple[int, int]
"""First, and one past the last."""


@dataclass(frozen=True)
class Pieces:
    """How a batch is divided into pieces.

    number: of pieces.  bounds: where each share of the batch begins, and where the last ends.
    whole_shares: piece k has the k-th of every `number` shares, whole; else the k-th of `number` parts of every share.
    fewer: then of as many parts as the smallest share has examples; the last pieces of a small batch have none.
    """

    number: int
    bounds: tuple[int, ...]
    whole_shares: bool = False
    fewer: bool = True

    def parts(self, piece: int) -> list[Interval]:
        """The examples of a piece, by share."""
        shares, n = enumerate(pairwise(self.bounds)), self.number
        if self.whole_shares:
            return [share for j, share in shares if j % n == piece]
        if self.fewer:
            n = min(n, max(1, min(b - a for a, b in pairwise(self.bounds))))
        if piece >= n:
            return []  # a small batch
        return [(a + (b - a) * piece // n, a + (b - a) * (piece + 1) // n) for _, (a, b) in shares]

    def examples(self, examples: Interval, piece: int | None) -> list[Interval]:
        """Those of an interval of examples that are in a piece; None: in any."""
        if piece is None or self.number == 1:
            return [examples]
        first, last = examples
        found = ((max(a, first), min(b, last)) for a, b in self.parts(piece))
        return [(a, b) for a, b in found if a < b]

    def positions(self, examples: Interval, piece: int | None) -> Interval:
        """Where an interval of examples lies in a piece: how many of the piece's examples stand before its ends."""
        if piece is None or self.number == 1:
            return examples
        starts, stops, before = _counted(self, piece)
        reached = (bisect_right(starts, end) - 1 for end in examples)  # the last part that begins before the end
        first, last = (
            before[k] + min(end, stops[k]) - starts[k] if k >= 0 else 0
            for k, end in zip(reached, examples, strict=True)
        )
        return first, last


@lru_cache(maxsize=256)
def _counted(pieces: Pieces, piece: int) -> tuple[list[int], list[int], list[int]]:
    """Where the parts of a piece begin and end, and how many of its examples stand before each."""
    parts = pieces.parts(piece)
    starts, stops = [a for a, _ in parts], [b for _, b in parts]
    return starts, stops, list(accumulate((b - a for a, b in parts), initial=0))


def pieces_of(scheme: str, number: int, readers: Sequence[int], group: Sequence[int]) -> Pieces:
    """The pieces in which a role computes: `number` parts of what each reader reads, or what Krizhevsky's scheme says.

    scheme: "BK" leaves a group's examples together, "B" takes one member's at a time, "B/K" an equal part of each
    member's.  readers, group: bounds of the readers' examples, and of the members' of a group.
    """
    if scheme == "BK":
        return Pieces(number, tuple(readers))
    return Pieces(len(group) - 1, tuple(group), whole_shares=scheme == "B", fewer=False)


def indices(intervals: Iterable[Interval], device: torch.device) -> Tensor:
    """All numbers in intervals, in their order, int32."""
    parts = [torch.arange(a, b, dtype=torch.int32, device=device) for a, b in intervals]
    return torch.cat([torch.empty(0, dtype=torch.int32, device=device), *parts])
