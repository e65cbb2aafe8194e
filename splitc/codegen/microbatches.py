"""Write the microbatches of a step: loops where its order is regular, else functions and a list of their calls.

for k in comm.microbatches():          def forward(k):
    cut0[k] = stage(comm[k], ...)          ...
    comm[k].send(cut0[k], "fc")        for k in range(2):
...                                        backward(k)
                                           forward(k + 2)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise

from splitc.codegen.layout import Line
from splitc.ir.actions import Action

_TABLES = 8  # declared in a line
_LAST = ("all_reduce", "push", "multiply")


@dataclass(frozen=True)
class _Unit:
    """Consecutive actions of one role in one microbatch; or an action that a step does once, of kind ""."""

    kind: str
    role: str
    microbatch: int
    actions: tuple[Action, ...]

    @property
    def function(self) -> tuple[str, ...]:
        """What it does in any microbatch; sums of gradients, which are in the last one, aside."""
        done = (f"{a.verb} {a.value} {a.peer}" for a in self.actions if a.verb not in _LAST)
        return self.kind, self.role, *done

    def is_later(self, other: _Unit, by: int) -> bool:
        """Whether this one is the same as the other one in a later microbatch."""
        return bool(self.kind) and self.function == other.function and self.microbatch == other.microbatch + by

    def continues(self, other: _Unit) -> bool:
        """Whether both are of one role in one microbatch."""
        return bool(self.kind and other.kind) and (self.role, self.microbatch) == (other.role, other.microbatch)


_Loop = tuple[int, tuple[_Unit, ...]]
"""How often in turn, and the units of the first time."""


def microbatched(
    actions: Sequence[Action],
    number: int,
    repeats: Callable[[Action], bool],
    is_early: Callable[[Action], bool],
    lines: Callable[[Action], list[Line]],
    comm: Callable[[str], str],
) -> list[Line]:
    """The lines of a step in `number` microbatches.

    repeats: whether an action is of one microbatch.  is_early: whether a group begins to take a value, which the
    producer's role just made.  lines: of an action, in microbatch `k`.  comm: variable of a role.
    """
    units = _merged(_units(actions, repeats, is_early))
    loops = list(_loops(units))
    counts = Counter((unit.kind, unit.role) for _, inside in loops for unit in inside if unit.kind)
    written = {unit.function: unit for unit in units if unit.kind}
    names = _names(list(written.values()))
    regular = max(counts.values()) == 1 and all(
        len({unit.microbatch for unit in inside}) == 1
        and len({unit.role for unit in inside if unit.kind != "enter"}) <= 1
        and times in (1, number)
        for times, inside in loops
    )
    body: list[Line] = []
    functions: list[Line] = []
    if not regular:
        for key, unit in written.items():
            functions += _function(unit, names[key], comm(unit.role), lines)
    for times, inside in loops:
        if not inside[0].kind:
            body += lines(inside[0].actions[0])
        elif regular:
            body.append((f"for k in {comm(inside[0].role)}.microbatches():", ""))
            body += _indented(line for unit in inside for action in unit.actions for line in lines(action))
        else:
            body += [*functions, *_calls(times, inside, names)]
            functions = []
    return [*_kept(body, [comm(unit.role) for unit in units]), *body]


def _units(
    actions: Sequence[Action], repeats: Callable[[Action], bool], is_early: Callable[[Action], bool]
) -> list[_Unit]:
    units: list[_Unit] = []
    for action in actions:
        kind = ("enter" if is_early(action) else action.row.unit) if repeats(action) else ""
        unit = _Unit(kind, action.role, action.microbatch, (action,))
        if units and kind == units[-1].kind and unit.continues(units[-1]):
            units[-1] = replace(unit, actions=(*units[-1].actions, action))
        else:
            units.append(unit)
    return units


def _merged(units: list[_Unit]) -> list[_Unit]:
    """Make one of two kinds of units that always follow each other."""
    pairs: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for k, (unit, following) in enumerate(pairwise(units)):
        if following.continues(unit):
            pairs[unit.role, unit.kind, following.kind].append(k)
    for (role, *kinds), places in pairs.items():
        if 2 * len(places) == sum(unit.role == role and unit.kind in kinds for unit in units):
            return _merged(list(_joined(units, places)))
    return units


def _joined(units: Sequence[_Unit], pairs: Sequence[int]) -> Iterator[_Unit]:
    """The units, with those at `pairs` and the ones behind them in one."""
    for k, unit in enumerate(units):
        if k in pairs:
            second = units[k + 1]
            kind = "run" if (unit.kind, second.kind) == ("forward", "backward") else second.kind
            yield replace(unit, kind=kind, actions=(*unit.actions, *second.actions))
        elif k - 1 not in pairs:
            yield unit


def _loops(units: Sequence[_Unit]) -> Iterator[_Loop]:
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
        yield times, tuple(units[place : place + size])
        place += times * size


def _names(units: Sequence[_Unit]) -> dict[tuple[str, ...], str]:
    """A name for each function; those of one kind and role are numbered from the second on."""
    several, names = len({unit.role for unit in units}) > 1, dict[tuple[str, ...], str]()
    plain = {f"{unit.kind}_{unit.role}" for unit in units}
    for unit in units:
        name = f"{unit.kind}_{unit.role}" if several else unit.kind
        others = (each for each in map((name + "_{}").format, count(2)) if each not in plain)
        names[unit.function] = next(each for each in chain([name], others) if each not in names.values())
    return names


def _function(unit: _Unit, name: str, comm: str, lines: Callable[[Action], list[Line]]) -> list[Line]:
    inner = [line for action in unit.actions for line in lines(action)]
    if unit.kind in ("forward", "backward"):  # apart, so that the loss is kept from one to the other
        inner = [(re.sub(r"\bloss( = |\.detach)", r"loss[k]\1", text), note) for text, note in inner]
        inner = [(text.replace("loss.backward", "loss.pop(k).backward"), note) for text, note in inner]
    if not unit.kind.startswith("receive"):
        inner = [(f"if k not in {comm}.microbatches():", ""), ("    return", "no examples here"), *inner]
    return [(f"def {name}(k):", ""), *_indented(inner), ("", "")]


def _calls(times: int, inside: Sequence[_Unit], names: Mapping[tuple[str, ...], str]) -> list[Line]:
    first = inside[0].microbatch
    if times == 1:
        return [(f"{names[unit.function]}({unit.microbatch})", "") for unit in inside]
    bounds = f"{first}, {first + times}" if first else f"{times}"
    offsets = (unit.microbatch - first for unit in inside)
    places = (f"k {'+' if by > 0 else '-'} {abs(by)}" if by else "k" for by in offsets)
    calls: list[Line] = [(f"{names[unit.function]}({place})", "") for unit, place in zip(inside, places, strict=True)]
    return [(f"for k in range({bounds}):", ""), *_indented(calls)]


def _indented(lines: Sequence[Line] | Iterator[Line]) -> list[Line]:
    return [(f"    {text}" if text else "", note) for text, note in lines]


def _kept(lines: Sequence[Line], comms: Sequence[str]) -> list[Line]:
    """The tables of values by microbatch, and the lists of them, that lines use."""
    text = "\n".join(line for line, _ in lines)
    tables = dict.fromkeys(re.findall(r"\b(\w+)(?:\[k\]|\.pop\(k\))", text))
    empty = {name: "{}" for name in tables if name not in comms}
    empty |= dict.fromkeys(re.findall(r"\b(\w+)\.append\(", text), "[]")
    names = list(empty)
    lines_of = [names[k : k + _TABLES] for k in range(0, len(names), _TABLES)]
    return [(f"{', '.join(some)} = {', '.join(empty[name] for name in some)}", "") for some in lines_of]
