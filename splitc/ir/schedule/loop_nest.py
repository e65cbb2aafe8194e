"""The loop nest of a step in microbatches, which codegen prints: what repeats in one microbatch after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.verbs import SUMS

_LAST = (*SUMS.values(), "multiply")


@dataclass(frozen=True)
class Unit:
    """Consecutive actions of one role in one microbatch; or an action that a step does once, of kind ""."""

    kind: str
    role: str
    microbatch: int
    actions: tuple[Action, ...]

    @property
    def function(self) -> tuple[str, ...]:
        """What it does in any microbatch; sums of gradients, which are in the last one, aside."""
        return self.kind, self.role, *(f"{a.verb} {a.value} {a.peer}" for a in self.actions if a.verb not in _LAST)

    def is_later(self, other: Unit, by: int) -> bool:
        """Whether this one is the same as the other one in a later microbatch."""
        return bool(self.kind) and self.function == other.function and self.microbatch == other.microbatch + by

    def continues(self, other: Unit) -> bool:
        """Whether both are of one role in one microbatch."""
        return bool(self.kind and other.kind) and (self.role, self.microbatch) == (other.role, other.microbatch)


@dataclass(frozen=True)
class Loop:
    """Units of consecutive microbatches.  times: how often in turn.  units: of the first time."""

    times: int
    units: tuple[Unit, ...]

    def is_whole(self, number: int) -> bool:
        """Whether it is of one role, and one action that a step does once or all of `number` microbatches."""
        roles = {unit.role for unit in self.units if unit.kind != "enter"}
        return len({unit.microbatch for unit in self.units}) == 1 and len(roles) <= 1 and self.times in (1, number)


@dataclass(frozen=True)
class LoopNest:
    """A step.  written: the units of any microbatch, each once.  regular: each is in one loop over all microbatches."""

    loops: tuple[Loop, ...]
    written: tuple[Unit, ...]
    regular: bool

    @property
    def apart(self) -> frozenset[str]:
        """The roles whose forward and backward are functions apart, so that values are kept from one to the other."""
        alone = (unit for unit in self.written if unit.kind in ("forward", "backward") and not self.regular)
        return frozenset(unit.role for unit in alone if any(action.verb == "forward" for action in unit.actions))


def loop_nest(
    actions: Sequence[Action], number: int, repeats: Callable[[Action], bool], is_early: Callable[[Action], bool]
) -> LoopNest:
    """Return the loops of a step in `number` microbatches.

    repeats: whether an action is of one microbatch.  is_early: whether a group begins to take a value, which the
    producer's role just made.
    """
    units: list[Unit] = []
    for action in actions:
        kind = ("enter" if is_early(action) else action.row.unit) if repeats(action) else ""
        unit = Unit(kind, action.role, action.microbatch, (action,))
        if units and kind == units[-1].kind and unit.continues(units[-1]):
            units[-1] = replace(unit, actions=(*units[-1].actions, action))
        else:
            units.append(unit)
    units = _merged(units)
    loops = tuple(_loops(units))
    counts = Counter((unit.kind, unit.role) for loop in loops for unit in loop.units if unit.kind)
    regular = max(counts.values()) == 1 and all(loop.is_whole(number) for loop in loops)
    return LoopNest(loops, tuple({unit.function: unit for unit in units if unit.kind}.values()), regular)


def _merged(units: list[Unit]) -> list[Unit]:
    """Make one of two kinds of units that always follow each other."""
    counts = Counter((unit.role, unit.kind) for unit in units)
    pairs = Counter((b.role, a.kind, b.kind) for a, b in pairwise(units) if b.continues(a))
    for (role, first, second), times in pairs.items():
        if 2 * times == sum(counts[role, kind] for kind in {first, second}):
            return _merged(_joined(units, role, first, second))
    return units


def _joined(units: Sequence[Unit], role: str, first: str, second: str) -> list[Unit]:
    kind, joined = "run" if (first, second) == ("forward", "backward") else second, list[Unit]()
    for unit in units:
        before = joined[-1] if joined else None
        if before and unit.continues(before) and (unit.role, before.kind, unit.kind) == (role, first, second):
            joined[-1] = replace(unit, kind=kind, actions=(*before.actions, *unit.actions))
        else:
            joined.append(unit)
    return joined


def _loops(units: Sequence[Unit]) -> Iterator[Loop]:
    """The units in order, those that repeat in one microbatch after the other together."""
    place = 0
    while place < len(units):
        times, size = 1, 1
        for period in range(1, (len(units) - place) // 2 + 1):
            found = 1
            while all(
                (later := place + found * period + k) < len(units) and units[later].is_later(units[place + k], found)
                for k in range(period)
            ):
                found += 1
            if found > 1 and found * period > times * size:
                times, size = found, period
        yield Loop(times, tuple(units[place : place + size]))
        place += times * size
