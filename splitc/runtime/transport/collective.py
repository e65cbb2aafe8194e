"""The operations on the wire, and the payload bytes that a rank sends in each: the one table of them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

PIECE = 2**18
"""Bytes of float32 numbers that travel as one piece of a sum in unequal parts: whole blocks of all formats."""


class Collective(StrEnum):
    """What an operation does on the wire."""

    SEND = "send"
    RECV = "recv"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    NONE = "none"  # the rank computes it alone

    def sent(self, nbytes: float, own: float, ranks: int) -> float:
        """Return the payload bytes that a rank sends.

        nbytes: of the whole value.  own: of this rank's part of it, which is the whole value for a sum or a message.
        """
        match self:
            case Collective.SEND:
                return own
            case Collective.ALL_GATHER:
                return (ranks - 1) * own
            case Collective.REDUCE_SCATTER:
                return nbytes - own
            case Collective.ALL_REDUCE:  # on a ring
                return 2 * (ranks - 1) / ranks * nbytes
            case _:
                return 0.0


def sum_parts(numel: int, ranks: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """How many of `numel` numbers each of `ranks` adds up for all, in each piece of a sum.

    shares: rank -> its part, in proportion to those of the others.  Where they are unequal a sum goes in pieces: a rank
    with a small part sends of one while it receives of another, and has its line in use both ways.
    """
    unequal = are_unequal(ranks, shares)
    bounds = [0, *accumulate(shares[rank] if unequal else 1 for rank in ranks)]
    size = PIECE // 4 if unequal else max(numel, 1)
    pieces = (min(size, numel - first) for first in range(0, numel, size))
    return [[n * b // bounds[-1] - n * a // bounds[-1] for a, b in pairwise(bounds)] for n in pieces]


def are_unequal(ranks: Sequence[int], shares: Sequence[int]) -> bool:
    """Whether the shares of `ranks` differ; there are none where those of all ranks are equal."""
    return bool(shares) and len({shares[rank] for rank in ranks}) > 1
