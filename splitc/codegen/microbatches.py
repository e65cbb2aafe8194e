"""Write the loop nest of a step in microbatches: loops where its order is regular, else functions and their calls.

for k in comm.microbatches():          def forward(k):
    cut0[k] = stage(comm[k], ...)          ...
    comm[k].send(cut0[k], "fc")        for k in range(2):
...                                        backward(k)
                                           forward(k + 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count

from splitc.codegen.layout import Line, block
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.loop_nest import Loop, LoopNest, Unit

_TABLES = 8  # declared in a line


def microbatched(
    nest: LoopNest, lines: Callable[[Action], list[Line]], comm: Callable[[str], str], tables: Mapping[str, str]
) -> list[Line]:
    """The lines of a step.

    lines: of an action, in microbatch `k`.  comm: variable of a role.  tables: what lines keep from one microbatch or
    function to another, and its value at first; filled when they are written.
    """
    names = _names(nest.written)
    body: list[Line] = []
    functions: list[Line] = []
    for unit in () if nest.regular else nest.written:
        functions += _function(unit, names[unit.function], comm(unit.role), lines)
    for loop in nest.loops:
        first = loop.units[0]
        if not first.kind:
            body += lines(first.actions[0])
        elif nest.regular:
            inner = (line for unit in loop.units for action in unit.actions for line in lines(action))
            body += block(f"for k in {comm(first.role)}.microbatches():", inner)
        else:
            body += [*functions, *_calls(loop, names)]
            functions = []
    return [*_declared(tables), *body]


def _names(units: Sequence[Unit]) -> dict[tuple[str, ...], str]:
    """A name for each function; those of one kind and role are numbered from the second on."""
    several, names = len({unit.role for unit in units}) > 1, dict[tuple[str, ...], str]()
    plain = {f"{unit.kind}_{unit.role}" for unit in units}
    for unit in units:
        name = f"{unit.kind}_{unit.role}" if several else unit.kind
        others = (each for each in map((name + "_{}").format, count(2)) if each not in plain)
        names[unit.function] = next(each for each in chain([name], others) if each not in names.values())
    return names


def _function(unit: Unit, name: str, comm: str, lines: Callable[[Action], list[Line]]) -> list[Line]:
    inner = [line for action in unit.actions for line in lines(action)]
    if not unit.kind.startswith("receive"):
        inner = [(f"if k not in {comm}.microbatches():", ""), ("    return", "no examples here"), *inner]
    return [*block(f"def {name}(k):", inner), ("", "")]


def _calls(loop: Loop, names: Mapping[tuple[str, ...], str]) -> list[Line]:
    first = loop.units[0].microbatch
    if loop.times == 1:
        return [(f"{names[unit.function]}({unit.microbatch})", "") for unit in loop.units]
    bounds = f"{first}, {first + loop.times}" if first else f"{loop.times}"
    offsets = (unit.microbatch - first for unit in loop.units)
    places = (f"k {'+' if by > 0 else '-'} {abs(by)}" if by else "k" for by in offsets)
    calls = ((f"{names[unit.function]}({place})", "") for unit, place in zip(loop.units, places, strict=True))
    return block(f"for k in range({bounds}):", calls)


def _declared(tables: Mapping[str, str]) -> list[Line]:
    """The tables of values by microbatch, then the lists of them."""
    names = sorted(tables, key=lambda name: tables[name] == "[]")
    lines_of = [names[k : k + _TABLES] for k in range(0, len(names), _TABLES)]
    return [(f"{', '.join(some)} = {', '.join(tables[name] for name in some)}", "") for some in lines_of]
