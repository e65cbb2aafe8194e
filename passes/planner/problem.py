"""The numbers of one division of the world, and what an assignment of its layers costs.

Plain numbers, no graph and no torch.  `integer_program` finds the best assignment; the equations cited here are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Place = tuple[int, str]
"""A role, and the state of a value there: batch, features, replicate; of a reader also divided, see `Option.reads`."""


@dataclass(frozen=True)
class Option:
    """One way to run a layer: in a role, with its parameters held and its gradient summed in some way.

    holding, split, state, sync: as of a `LayerPlacement`.
    reads: the state in which it reads what its parameters are applied to; "divided" is replicate of which each rank
    computes a part, so that its gradient is a sum.  joins: the state of all else that it reads.  makes: the state of
    its result.  divides: the dimension of its weight that is divided over the group; -1: none, and the group computes
    alike; None: none, and each rank computes its own examples.
    forward, backward: seconds of a step on the busiest rank; there, back: to move its result into the state that it
    makes, and the gradient back.  syncing: seconds to sum its gradient.  updating: seconds of the
    optimizer, where nothing else runs meanwhile.  memory: bytes on a rank.
    """

    role: int
    holding: str = "replicated"
    split: str | None = None
    state: str | None = None
    sync: str = "all_reduce"
    reads: str = "batch"
    joins: str = "batch"
    makes: str = "batch"
    divides: int | None = None
    forward: float = 0.0
    backward: float = 0.0
    there: float = 0.0
    back: float = 0.0
    syncing: float = 0.0
    updating: float = 0.0
    memory: float = 0.0

    @property
    def computing(self) -> float:
        return self.forward + self.backward

    @property
    def moving(self) -> float:
        return self.there + self.back


@dataclass(frozen=True)
class Move:
    """What it takes to bring a value from one place to another, and its gradient back.

    there, back: seconds.  memory: bytes on a rank of either role.
    """

    there: float
    back: float = 0.0
    memory: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        return self.there + self.back


@dataclass(frozen=True)
class Value:
    """A value that other layers read.  layer: the one that makes it; None for an input of the step, in (0, "batch").

    readers: the layers that read it, and how: "reads" or "joins", see `Option`; "whole" is "joins" of what has no
    features to divide.
    moves: (where it is made, where it is read) -> what that takes; a pair that is missing is impossible.
    """

    name: str
    layer: str | None
    readers: tuple[tuple[str, str], ...]
    moves: Mapping[tuple[Place, Place], Move]

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(reader for reader, _ in self.readers)


@dataclass(frozen=True)
class StepSeconds:
    """The terms of equation (1), in seconds.

    path: of all that follows one on the other.  load: of the busiest rank or line, in forward and in backward.
    exposed: of syncs that nothing hides and of the optimizer, as the mean over the batches of an update.
    """

    path: float
    load: float
    exposed: float
    microbatches: int

    @property
    def total(self) -> float:
        m = self.microbatches
        return self.path / m + (1 - 1 / m) * self.load + self.exposed


@dataclass(frozen=True)
class Problem:
    """The numbers of equations (1) to (12).

    options: layer -> how it can run, in topological order.  parameters: layers that have some.
    order: pairs (i, j): j reads what i makes, so its role is not an earlier one.  together: pairs of one role.
    tied: pairs that share a parameter, which is used in one way: else its gradient travels in every piece.
    ranks: role -> the class of ranks that it runs on; roles of one class share ranks.  memory: bytes of a rank.
    filled: roles that need a layer with parameters.  wanted: what some layer must have, as (part of an option, values).
    overlap: whether syncs hide under backward.  accumulate: batches to an update.
    """

    options: Mapping[str, tuple[Option, ...]]
    values: tuple[Value, ...]
    parameters: frozenset[str]
    order: tuple[tuple[str, str], ...]
    together: tuple[tuple[str, str], ...]
    tied: tuple[tuple[str, str], ...]
    ranks: tuple[int, ...]
    memory: float
    filled: frozenset[int]
    wanted: tuple[tuple[str, frozenset[str]], ...] = ()
    microbatches: int = 1
    overlap: bool = True
    accumulate: int = 1

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """The classes of ranks."""
        return tuple(dict.fromkeys(self.ranks))

    def step(self, chosen: Mapping[str, Option]) -> StepSeconds:
        """The seconds of a step: equations (1) to (4)."""
        path, loads = 0.0, tuple(defaultdict[tuple[str, int], float](float) for _ in range(2))
        for option in chosen.values():
            path += option.computing + option.moving
            where = self.ranks[option.role]
            for load, computing, moving in zip(
                loads, (option.forward, option.backward), (option.there, option.back), strict=True
            ):
                load["computing", where] += computing
                load["moving", where] += moving
        for _, (start, end), move in self.moved(chosen):
            path += move.seconds
            for where in {self.ranks[start[0]], self.ranks[end[0]]}:
                for load, seconds in zip(loads, (move.there, move.back), strict=True):
                    load["moving", where] += seconds
        slowest = sum(max(load.values(), default=0.0) for load in loads)
        updating = sum(option.updating for option in chosen.values())
        return StepSeconds(path, slowest, (self._exposed(chosen) + updating) / self.accumulate, self.microbatches)

    def _exposed(self, chosen: Mapping[str, Option]) -> float:
        """Equation (4): what is left of the syncs of each class of ranks when its backward ends."""
        left = dict.fromkeys(self.classes, 0.0)
        for layer in reversed(list(self.options)):
            option, where = chosen[layer], self.ranks[chosen[layer].role]
            hidden = option.backward / self.microbatches if self.overlap else 0.0
            left[where] = max(0.0, left[where] - hidden) + option.syncing
        return sum(left.values())

    def moved(self, chosen: Mapping[str, Option]) -> list[tuple[Value, tuple[Place, Place], Move]]:
        """Each value once for each place that its readers need it in; KeyError where that is impossible."""
        found = []
        for value in self.values:
            made = made_at(value, chosen)
            for need in {need_of(chosen[reader], how): None for reader, how in value.readers}:
                found.append((value, (made, need), value.moves[made, need]))
        return found

    def memory_of(self, chosen: Mapping[str, Option]) -> dict[int, float]:
        """Bytes that a rank of each class needs: the left side of equation (11)."""
        need = dict.fromkeys(self.classes, 0.0)
        for option in chosen.values():
            need[self.ranks[option.role]] += option.memory
        for _, (start, end), move in self.moved(chosen):
            for (role, _), nbytes in zip((start, end), move.memory, strict=True):
                need[self.ranks[role]] += nbytes
        return need

    def broken(self, chosen: Mapping[str, Option]) -> list[str]:
        """The equations that an assignment does not meet, each once, by number."""
        return [*dict.fromkeys(self._broken(chosen))]

    def _broken(self, chosen: Mapping[str, Option]) -> list[str]:
        role = {layer: option.role for layer, option in chosen.items()}
        trained = {chosen[layer].role for layer in self.parameters}
        wrong = ["eq6" for i, j in self.order if role[i] > role[j]]
        wrong += ["eq8" for i, j in self.together if role[i] != role[j]]
        wrong += ["eq9" for i, j in self.tied if chosen[i].divides != chosen[j].divides]
        wrong += ["eq10"] * (not self.filled <= trained)
        wrong += ["eq12" for part, words in self.wanted if words.isdisjoint(getattr(o, part) for o in chosen.values())]
        try:
            wrong += ["eq11" for nbytes in self.memory_of(chosen).values() if nbytes > self.memory * (1 + 1e-9)]
        except KeyError:
            wrong.append("eq7")
        return wrong

    def least_seconds(self) -> float:
        """A bound that needs no solver: each layer as is best for the bound, and at least one value crosses.

        By (1) to (4) a step takes at least the path, and at least the forward and the syncs.
        """
        m, classes = self.microbatches, len(self.classes)
        crossing = [move.seconds for value in self.values for (s, t), move in value.moves.items() if s[0] != t[0]]
        crosses = min(crossing, default=0.0) if self.filled else 0.0
        path = synced = 0.0
        for options in self.options.values():
            path += min((o.computing for o in options), default=0.0)
            synced += min((o.forward / m + o.syncing + o.updating for o in options), default=0.0)
        load = (1 - 1 / m) * max(path / classes, crosses)
        last = max(path / m, synced) if self.overlap else path / m  # of the batches of an update
        return path / m + (last - path / m) / self.accumulate + crosses / m + load


def made_at(value: Value, chosen: Mapping[str, Option]) -> Place:
    """Where a value is made."""
    return (0, "batch") if value.layer is None else (chosen[value.layer].role, chosen[value.layer].makes)


def need_of(option: Option, how: str) -> Place:
    """Where a reader needs a value that it reads in some way, see `Value`."""
    if how == "reads":
        return option.role, option.reads
    return option.role, "replicate" if (how, option.joins) == ("whole", "features") else option.joins


def places(options: Sequence[Option], how: str = "makes") -> tuple[Place, ...]:
    """The places in which options make values, or need them."""
    if how == "makes":
        return tuple(dict.fromkeys((o.role, o.makes) for o in options))
    return tuple(dict.fromkeys(need_of(o, how) for o in options))
