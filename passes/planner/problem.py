"""The numbers of one division of the world, and what an assignment of its layers costs.

Plain numbers, no graph and no torch.  `integer_program` finds the best assignment; the equations cited here are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

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

    @cached_property
    def computing(self) -> float:
        return self.forward + self.backward

    @cached_property
    def moving(self) -> float:
        return self.there + self.back

    @property
    def way(self) -> int | str | None:
        """How it uses a parameter, which other layers that share it then do too; None: on each rank's examples."""
        return self.divides if self.sync in ("all_reduce", "none") else self.sync


@dataclass(frozen=True)
class Move:
    """What it takes to bring a value from one place to another, and its gradient back.

    there, back: seconds.  memory: bytes on a rank of either role.
    """

    there: float
    back: float = 0.0
    memory: tuple[float, float] = (0.0, 0.0)

    @cached_property
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
    pieces: int = 1
    overlap: bool = True
    accumulate: int = 1

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """The classes of ranks."""
        return tuple(dict.fromkeys(self.ranks))

    @cached_property
    def fullness(self) -> float:
        """The part of its memory that the fullest rank needs at least; above 1, equation (11) cannot hold."""
        least = sum(min((o.memory for o in options), default=0.0) for options in self.options.values())
        return least / len(self.classes) / self.memory / (1 + 1e-6)

    def seconds(self, chosen: Mapping[str, Option]) -> float:
        """The seconds of a step: equations (1) to (4)."""
        return float(self._equations(chosen).step())

    def memory_of(self, chosen: Mapping[str, Option]) -> dict[int, float]:
        """Bytes that a rank of each class needs: the left side of equation (11)."""
        equations = self._equations(chosen)
        return {where: equations.memory(where) for where in self.classes}

    def broken(self, chosen: Mapping[str, Option]) -> list[str]:
        """The equations that an assignment does not meet, each once, by number."""
        try:
            equations = self._equations(chosen)
        except KeyError:
            equations = Equations(self, _alone(chosen), [])
            return [*dict.fromkeys((*equations.broken(), "eq7"))]
        full = any(equations.memory(where) > self.memory * (1 + 1e-9) for where in self.classes)
        return [*dict.fromkeys((*equations.broken(), *["eq11"] * full))]

    def _equations(self, chosen: Mapping[str, Option]) -> Equations:
        """Their left sides in numbers; KeyError where a value cannot be moved as it must."""
        return Equations(self, _alone(chosen), [(value, *place, 1) for value, place, _ in self.moved(chosen)])

    def moved(self, chosen: Mapping[str, Option]) -> list[tuple[Value, tuple[Place, Place], Move]]:
        """Each value once for each place that its readers need it in; KeyError where that is impossible."""
        found = []
        for value in self.values:
            made = made_at(value, chosen)
            for need in {need_of(chosen[reader], how): None for reader, how in value.readers}:
                found.append((value, (made, need), value.moves[made, need]))
        return found

    def least_seconds(self) -> float:
        """A bound that needs no solver: each layer as is best for the bound, and at least one value crosses.

        By (1) to (4) a step takes at least the path, and at least the forward and the syncs.
        """
        m, classes = self.pieces, len(self.classes)
        moves = {id(value.moves): value.moves for value in self.values}.values()
        crossing = [move.seconds for each in moves for (s, t), move in each.items() if s[0] != t[0]]
        crosses = min(crossing, default=0.0) if self.filled else 0.0
        path = synced = 0.0
        for options in self.options.values():
            path += min((o.computing for o in options), default=0.0)
            synced += min((o.forward / m + o.syncing + o.updating for o in options), default=0.0)
        load = (1 - 1 / m) * max(path / classes, crosses)
        last = max(path / m, synced) if self.overlap else path / m  # of the batches of an update
        return path / m + (last - path / m) / self.accumulate + crosses / m + load


def _alone(chosen: Mapping[str, Option]) -> dict[str, list[tuple[Option, Any]]]:
    return {layer: [(option, 1)] for layer, option in chosen.items()}


@dataclass(eq=False)
class Equations:
    """The equations, in x and z that are 0 or 1, or variables of a solver.

    runs: layer -> its options, each with its x.  moved: values with the places that they are moved between, and z.
    Seconds are counted in units of 1 / `scale`.
    """

    problem: Problem
    runs: Mapping[str, Sequence[tuple[Option, Any]]]
    moved: Sequence[tuple[Value, Place, Place, Any]]
    scale: float = 1.0

    def total(self, terms: Iterable[tuple[float, Any]]) -> Any:
        """The sum of many numbers times variables."""
        return reduce(add, (number * x for number, x in terms), 0.0)

    def highest(self, name: str, terms: Iterable[Any]) -> Any:
        """The highest of some terms and 0."""
        return max(0.0, *terms)

    def step(self) -> Any:
        """The seconds of a step: equations (1) and (2)."""
        problem, m = self.problem, self.problem.pieces
        path = [(self.scale * (option.computing + option.moving), x) for option, x in self._in()]
        path += [(self.scale * value.moves[s, t].seconds, z) for value, s, t, z in self.moved]
        load = self._load("forward") + self._load("backward") if m > 1 else 0
        exposed = sum(self._left(where) for where in problem.classes)
        exposed += self.total((self.scale * option.updating, x) for option, x in self._in() if option.updating)
        return self.total(path) / m + (1 - 1 / m) * load + exposed / problem.accumulate

    def _in(self, where: int | None = None) -> list[tuple[Option, Any]]:
        """All options, or those on a class of ranks, with their x."""
        ranks = self.problem.ranks
        return [(o, x) for each in self.runs.values() for o, x in each if where in (None, ranks[o.role])]

    def _load(self, direction: str) -> Any:
        """Equation (3) of one direction."""
        ranks, name = self.problem.ranks, "there" if direction == "forward" else "back"
        loads = []
        for where in self.problem.classes:
            own = self._in(where)
            moved = [(v.moves[s, t], z) for v, s, t, z in self.moved if where in (ranks[s[0]], ranks[t[0]])]
            loads.append([(getattr(option, direction), x) for option, x in own])
            loads.append([(getattr(each, name), x) for each, x in (*own, *moved)])
        terms = [self.total((self.scale * seconds, x) for seconds, x in load if seconds) for load in loads]
        return self.highest(f"load[{direction}]", terms)

    def _left(self, where: int) -> Any:
        """Equation (4) of a class of ranks: what its syncs expose."""
        problem, left = self.problem, None
        for layer in reversed(list(problem.options)):
            own = [(option, x) for option, x in self.runs[layer] if problem.ranks[option.role] == where]
            sends = any(option.syncing for option, _ in own)
            if not own or not (sends or left is not None):
                continue
            syncing = self.total((self.scale * option.syncing, x) for option, x in own)
            terms: list[Any] = []
            if left is not None:
                hidden = self.scale / problem.pieces if problem.overlap else 0.0
                terms.append(left - self.total((hidden * option.backward, x) for option, x in own) + syncing)
            left = self.highest(f"left[{where},{layer}]", [*terms, syncing] if sends else terms)
        return 0 if left is None else left

    def memory(self, where: int) -> Any:
        """Bytes that a rank of a class needs: the left side of equation (11)."""
        need = [(option.memory, x) for option, x in self._in(where)]
        for value, s, t, z in self.moved:
            for (role, _), nbytes in zip((s, t), value.moves[s, t].memory, strict=True):
                if self.problem.ranks[role] == where and nbytes:
                    need.append((nbytes, z))
        return self.total(need)

    def rules(self) -> Iterator[tuple[str, Any]]:
        """Yield equations (6), (8), (9), (10) and (12), each with a name that begins with its number."""
        problem = self.problem
        for name, pairs in (("eq6", problem.order), ("eq8", problem.together)):
            for i, j in dict.fromkeys(pairs):
                for role in range(1, len(problem.ranks)):
                    a, b = (self.having([layer], lambda o, r=role: o.role >= r) for layer in (i, j))
                    yield f"{name}_{i}_to_{j}_{role}", a <= b if name == "eq6" else a == b
        for i, j in dict.fromkeys(problem.tied):
            for way in sorted({o.way for layer in (i, j) for o in problem.options[layer]} - {None}, key=str):
                a, b = (self.having([layer], lambda o, w=way: o.way == w) for layer in (i, j))
                yield f"eq9_{i}_{j}_{way}", a == b
        for role in sorted(problem.filled):
            yield f"eq10_{role}", self.having(sorted(problem.parameters), lambda o, r=role: o.role == r) >= 1
        for part, words in problem.wanted:
            yield f"eq12_{part}", self.having(problem.options, lambda o, p=part, w=words: getattr(o, p) in w) >= 1

    def having(self, layers: Iterable[str], of: Callable[..., bool]) -> Any:
        """The sum of x over the options of layers that `of` holds for."""
        return self.total((1, x) for layer in layers for option, x in self.runs[layer] if of(option))

    def broken(self) -> list[str]:
        """The numbers of the rules that do not hold."""
        return [name.partition("_")[0] for name, holds in self.rules() if not holds]


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
