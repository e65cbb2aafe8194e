"""The smallest change with which a request that has no plan has one: parts of it are changed one at a time.

Of a plan file, which has decided all of them, the options with which one is made anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from math import inf
from typing import Any

from splitc.errors import SplitcError
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import options_of, parse_strategy
from splitc.report.what_if import Asked, Made, Quantity, changed, choice_text, patient, quantities
from splitc.runtime.transport.formats import AS_COMPUTED, EXACT
from splitc.strategies.auto import Auto

_MOST_MEMORY = 2**30  # times what a rank has
_FAR, _MOST_BATCH = 8, 64  # times a number, at most


def what_fits(place: Place, program: Program, made: Made) -> str:
    """Return what is in the way of a plan, and the smallest change with which there is one; "" where none was found.

    Of memory, where that is all that is short, all changes of which each is enough.
    made: the plan of a request, of which it raises PlacementError if there is none.
    Raises TimeoutError when that takes more than half a minute, or SPLITC_ADVICE seconds.
    """
    made = patient(made)
    _, batch, world, memory, parts = quantities(place, program, made)
    if memory.plan(memory.now * _MOST_MEMORY) is None:
        change = next(filter(None, _changes(place, program, made)), "")
        return change and f"the smallest change of one part with which there is a plan: {change}"
    ranks = min(_FAR, (place.cluster.world or inf) / place.world)
    changes = (each.nearest(to) for each, to in ((parts, 16), (world, ranks), (batch, 1 / batch.now)))
    fitting = [f"{memory.nearest(_MOST_MEMORY)} a rank", *filter(None, changes)]
    return f"memory is what is short: a rank has {memory.text(memory.now)}; it would fit with {', or '.join(fitting)}"


def planned_anew(plan: Plan, place: Place, program: Program, made: Made) -> str:
    """Return the options with which there is a plan, nearest to one that does not fit; "" where none was found.

    place: what the plan was to fit.  made, TimeoutError: as of `what_fits`.
    """
    made, world = patient(made), min(plan.world, place.cluster.world or plan.world)
    batch = plan.global_batch if plan.batch_offsets else None
    for name in dict.fromkeys((plan.strategy, "auto")):
        with suppress(SplitcError):
            asked = replace(place, world=world, global_batch=batch, strategy=parse_strategy(name))
            options = f"--world {world} --strategy {name}{f' --global-batch {batch}' if batch else ''}"
            return (
                f"made anew there is a plan, {choice_text(made(asked, program))}, with {options} in place of the file"
            )
    return ""


def _changes(place: Place, program: Program, made: Made) -> Iterator[str]:
    """Yield the changes that are enough, those first that leave most as it was asked for; "" for one that is not."""
    strategy, pins, wire = place.strategy, place.pins, place.wire

    def enough(text: str, **parts: Any) -> str:
        with suppress(SplitcError):
            return text * bool(made(*changed(place, program, **parts)))
        return ""

    def number(option: str, now: int) -> str:
        """Return the strategy with the value nearest to a number with which there is a plan."""

        def change(value: float) -> Asked:
            own: Any = {option: value}
            return changed(place, program, strategy=replace(strategy, **own))

        found = Quantity(option, now, lambda x: f"strategy {change(x)[0].strategy}", True, made, change)
        return found.nearest(1 / now, _FAR)

    for pattern in pins:
        yield enough(f"without the pin {pattern!r}", pins={name: pin for name, pin in pins.items() if name != pattern})
    for each in options_of(strategy):
        if (value := getattr(strategy, each.name)) not in (None, each.default):
            yield number(each.name, value) if type(value) is int else ""
            with suppress(SplitcError):
                usual: Any = {each.name: each.default}
                yield enough(f"strategy {(other := replace(strategy, **usual))}", strategy=other)
    yield enough("accumulate=1", accumulate=1) if place.accumulate > 1 else ""
    for kind in [each.name for each in fields(wire) if getattr(wire, each.name) != EXACT]:
        yield enough(f"wire without {kind}", wire=replace(wire, **{kind: EXACT}))
    _, batch, world, *_ = quantities(place, program, made)
    yield batch.nearest(1 / batch.now, _MOST_BATCH)
    yield world.nearest(1 / world.now, min(_FAR, (place.cluster.world or inf) / place.world))
    for other, kept in ((type(strategy)(), pins), (Auto(), pins), (strategy, {}), (Auto(), {})):
        text = f"strategy {other}{', without pins' * (kept != pins)}"
        yield enough(text, strategy=other, pins=kept, wire=wire if other is strategy else AS_COMPUTED)
