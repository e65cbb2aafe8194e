"""The smallest change with which a request that has no plan has one: parts of it are changed one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from math import inf
from typing import Any

from splitc.errors import SplitcError
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import options_of
from splitc.report.what_if import Made, Quantity, patient, quantities
from splitc.runtime.transport.formats import AS_COMPUTED, EXACT
from splitc.strategies.auto import Auto

_MOST_MEMORY = 2**30  # times what a rank has
_FAR = 8  # times a number, at most


def what_fits(place: Place, program: Program, made: Made) -> str:
    """Return what is in the way of a plan, and the smallest change with which there is one; "" where none was found.

    Of memory, where that is all that is short, all changes of which each is enough.
    made: the plan of a request, of which it raises PlacementError if there is none.
    Raises TimeoutError when that takes more than half a minute, or SPLITC_ADVICE seconds.
    """
    made = patient(made)
    _, batch, world, memory, parts = quantities(place, program, made)
    if memory.plan(memory.now * _MOST_MEMORY) is None:
        change = next(_changes(place, program, made), "")
        return change and f"the smallest change of one part with which there is a plan: {change}"
    ranks = min(_FAR, (place.cluster.world or inf) / place.world)
    changes = (each.least(each.reach(to)) for each, to in ((parts, 16), (world, ranks), (batch, 1 / batch.now)))
    fitting = [f"{memory.least(memory.reach(_MOST_MEMORY))} a rank", *filter(None, changes)]
    return f"memory is what is short: a rank has {memory.text(memory.now)}; it would fit with {', or '.join(fitting)}"


def _changes(place: Place, program: Program, made: Made) -> Iterator[str]:
    """Yield the changes that are enough, those first that leave most as it was asked for."""

    def works(**parts: Any) -> bool:
        with suppress(SplitcError):
            return bool(made(replace(place, **parts), program))
        return False

    def number(option: str, now: int) -> str:
        """Return the strategy with the value nearest to a number with which there is a plan."""

        def change(value: float) -> tuple[Place, Program]:
            own: Any = {option: int(value)}
            return replace(place, strategy=replace(asked, **own)), program

        return Quantity(option, now, lambda x: f"strategy {change(x)[0].strategy}", True, made, change).nearest(_FAR)

    asked, pins, wire = place.strategy, place.pins, place.wire
    for pattern in pins:
        if works(pins={each: pin for each, pin in pins.items() if each != pattern}):
            yield f"without the pin {pattern!r}"
    given = [each for each in options_of(asked) if getattr(asked, each.name) not in (None, each.default)]
    for each in given:
        value = getattr(asked, each.name)
        if type(value) is int and (text := number(each.name, value)):
            yield text
        with suppress(SplitcError):
            usual: Any = {each.name: each.default}
            other = replace(asked, **usual)
            if works(strategy=other):
                yield f"strategy {other}"
    if place.accumulate > 1 and works(accumulate=1):
        yield "accumulate=1"
    for kind in [each.name for each in fields(wire) if getattr(wire, each.name) != EXACT]:
        if works(wire=replace(wire, **{kind: EXACT})):
            yield f"wire without {kind}"
    most = (place.cluster.world or inf) / place.world
    _, batch, world, *_ = quantities(place, program, made)
    yield from filter(None, (batch.nearest(inf), world.nearest(min(_FAR, most))))
    for strategy, kept in ((type(asked)(), pins), (Auto(), pins), (asked, {}), (Auto(), {})):
        if works(strategy=strategy, pins=kept, wire=wire if strategy is asked else AS_COMPUTED):
            yield f"strategy {strategy}{', without pins' * (kept != pins)}"
