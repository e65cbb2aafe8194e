"""The five states of a value in a group of ranks, and the moves from one to another.

N examples of the group, D features (the last dim), k ranks:

    state       a rank holds                                      shape         its gradient
    batch       its own examples, all features                    (N/k, D)      batch
    features    all examples, its slice of the features           (N, D/k)      features
    replicate   everything, and all ranks compute alike with it   (N, D)        replicate
    divided     everything, of which each rank's readers          (N, D)        partial
                compute a part of what follows
    partial     a term of a sum                                   (N, D)        replicate

A transition moves a value from state to state; its backward moves the gradient from the state of the target's gradient
to that of the source's, so both directions follow from `MOVES`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ..transport.collective import Collective


class State(StrEnum):
    """How the ranks of a group hold a value."""

    BATCH = "batch"
    FEATURES = "features"
    REPLICATE = "replicate"
    DIVIDED = "divided"
    PARTIAL = "partial"

    @property
    def gradient(self) -> State:
        """The state of its gradient."""
        return {State.DIVIDED: State.PARTIAL, State.PARTIAL: State.REPLICATE}.get(self, self)


class Move(StrEnum):
    """What the ranks of a group do to bring a tensor from one state to another."""

    GATHER = "gather"  # all-gather of the ranks' parts
    EXCHANGE = "exchange"  # all-to-all: parts along one dim become parts along the other
    SUM = "sum"  # all-reduce of the terms
    SCATTER_SUM = "scatter_sum"  # reduce-scatter: a part of the sum of the terms
    SLICE = "slice"  # this rank's part of what all have
    PAD = "pad"  # its part as a term of a sum, zeros elsewhere
    SAME = "same"

    @property
    def collective(self) -> Collective:
        """What it does on the wire."""
        return _COLLECTIVES.get(self, Collective.NONE)

    @property
    def communicates(self) -> bool:
        """Whether anything travels."""
        return self in _COLLECTIVES


_COLLECTIVES = {
    Move.GATHER: Collective.ALL_GATHER,
    Move.EXCHANGE: Collective.ALL_TO_ALL,
    Move.SUM: Collective.ALL_REDUCE,
    Move.SCATTER_SUM: Collective.REDUCE_SCATTER,
}


_B, _F, _R, _D, _P = State
MOVES = {
    (_B, _R): Move.GATHER,
    (_F, _R): Move.GATHER,
    (_B, _F): Move.EXCHANGE,
    (_F, _B): Move.EXCHANGE,
    (_P, _R): Move.SUM,
    (_P, _B): Move.SCATTER_SUM,
    (_P, _F): Move.SCATTER_SUM,
    (_R, _B): Move.SLICE,
    (_R, _F): Move.SLICE,
    (_B, _P): Move.PAD,
    (_F, _P): Move.PAD,
    (_R, _R): Move.SAME,
}
"""(from, to) -> the move; a divided value lies as a replicated one."""


class Transition(NamedTuple):
    """A value's way from one state to another, and its gradient's way back."""

    source: State
    target: State

    @property
    def move(self) -> Move:
        """What the ranks do with the value."""
        whole = {State.DIVIDED: State.REPLICATE}
        return MOVES[whole.get(self.source, self.source), whole.get(self.target, self.target)]

    @property
    def adjoint(self) -> Transition:
        """The way of the gradient."""
        return Transition(self.target.gradient, self.source.gradient)

    @property
    def by_examples(self) -> bool:
        """Whether the parts, of an exchange those that it begins with, lie along the examples, else the features."""
        return State.BATCH in self[: 1 + (State.FEATURES not in self)]

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class Extents(NamedTuple):
    """How the ranks of a group divide a value: rows of each along `dim`, and features of each along the last dim.

    Either may be left out where no transition divides the value so.
    """

    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    dim: int = 0

    def sizes(self, by_examples: bool) -> tuple[int, tuple[int, ...]]:
        """The dim along which the ranks have parts, and their sizes."""
        return (self.dim, self.rows) if by_examples else (-1, self.widths)
