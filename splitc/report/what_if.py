"""Plan a request again with more or less of something: where the choice flips, and what uses all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf, sqrt
from time import perf_counter
from typing import Any

from splitc import units
from splitc.cost_models.simulation.timeline import Timeline, simulate
from splitc.errors import PlacementError, SplitcError
from splitc.ir.cluster import Cluster
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import in_microbatches
from splitc.passes.rewriting import lower_unchecked
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel

_PRECISION = 0.03  # of a breakpoint
_STEPS = 2  # to simulate: transfers of the first may still be under way in the second
_FAR = 64  # times the bandwidth or the batch, for advice
_PATIENCE = 30.0  # seconds, for what nobody asked for by name; the environment's SPLITC_ADVICE goes before it
_MOST_MEMORY = 2**30  # times what a rank has

Asked = tuple[Place, Program]
"""A request, and the program that it is for."""

Made = Callable[[Place, Program], Plan]


@dataclass(frozen=True)
class Quantity:
    """A number in a request that its plan depends on.

    now: its value.  text: a value in words.  whole: it is a whole number.  change: the request with another value.
    made: the plan of a request.
    """

    name: str
    now: float
    text: Callable[[float], str]
    whole: bool
    made: Made
    change: Callable[[float], Asked]
    plans: dict[float, Plan | None] = field(default_factory=dict, repr=False)

    def plan(self, value: float) -> Plan | None:
        """The plan that is chosen at a value; None when nothing fits."""
        if value not in self.plans:
            self.plans[value] = None
            with suppress(SplitcError):
                self.plans[value] = self.made(*self.change(value))
        return self.plans[value]

    def nearest(self, *factors: float) -> str:
        """Return the value nearest to it, up to a factor times it, at which there is a plan, in words; or ""."""
        ends = (self.boundary(lambda plan: plan is None, self.reach(factor)) for factor in factors)
        found = [end[1] for end in ends if end]
        return self.text(min(found, key=lambda at: abs(at - self.now))) if found else ""

    def boundary(self, holds: Callable[[Plan | None], object], reach: Iterable[float]) -> tuple[float, float] | None:
        """Return the last value whose plan `holds` and the first whose does not, to 3 %, going along `reach`.

        That of now does.  None: all do.
        """
        last = self.now
        for first in reach:
            if not holds(self.plan(first)):
                break
            last = first
        else:
            return None
        while abs(first - last) > max(_PRECISION * min(first, last), self.whole):
            middle = (first + last) // 2 if self.whole else sqrt(first * last)
            last, first = (middle, first) if holds(self.plan(middle)) else (last, middle)
        return last, first

    def reach(self, factor: float) -> list[float]:
        """Return values ever farther from it, up or down to `factor` times it; whole ones from 1 on."""
        end, steps = self.now * factor, [2**k for k in range(64)]
        end = max(1, round(end)) if self.whole else end
        values = [self.now * step if end > self.now else self.now / step for step in steps]
        if self.whole and self.name not in ("batch", "microbatches"):  # near ones differ in what divides them
            values += [self.now + step if end > self.now else self.now - step for step in steps]
        low, high = sorted((self.now, end))
        within = (round(value) if self.whole else value for value in values if low <= value <= high)
        return sorted({end, *within} - {self.now}, reverse=end < self.now)


def planned(place: Place, program: Program) -> Plan:
    """The plan of a request, which fits as the planner adds memory up."""
    return place.run(program).plan


def patient(made: Made) -> Made:
    """`made`, which raises TimeoutError after half a minute, or SPLITC_ADVICE seconds."""
    until = perf_counter() + advice_seconds()

    def timed(place: Place, program: Program) -> Plan:
        if perf_counter() > until:
            raise TimeoutError
        return made(place, program)

    return timed


def quantities(place: Place, program: Program, made: Made = planned) -> tuple[Quantity, ...]:
    """Return bandwidth between hosts, batch, world, memory of a rank, and microbatches.  made: see `Quantity`."""
    examples = "a global batch of {:.0f}" if place.global_batch else "{:.0f} examples a reader"
    memory = place.memory or place.cluster.device_for(place.world).memory
    found: tuple[tuple[str, float, Callable[[float], str], bool], ...] = (
        ("bandwidth", place.cluster.link.bandwidth, units.bandwidth, False),
        ("batch", place.global_batch or program.batch, examples.format, True),
        ("world", place.world, "a world of {:.0f}".format, True),
        ("memory", memory, units.nbytes, False),
        ("microbatches", 1, "microbatches={:.0f}".format, True),
    )

    def change(name: str) -> Callable[[float], Asked]:
        return lambda value: changed(place, program, **{name: value})

    return tuple(Quantity(*each, made, change(each[0])) for each in found)


def changed(place: Place, program: Program, **parts: Any) -> Asked:
    """Return a request with other values of quantities, or of other fields of its Place."""
    if "batch" in parts and place.global_batch is None:
        program = replace(program, batch=parts.pop("batch"))
    elif "batch" in parts:
        parts["global_batch"] = parts.pop("batch")
    if "bandwidth" in parts:
        parts["cluster"] = place.cluster.with_bandwidth(parts.pop("bandwidth"))
    if "microbatches" in parts:
        parts["strategy"] = in_microbatches(place.strategy, parts.pop("microbatches"))
    return replace(place, **parts), program


def advice_seconds() -> float:
    """Seconds that advice may take."""
    given = os.environ.get("SPLITC_ADVICE", _PATIENCE)
    try:
        return float(given)
    except ValueError:
        raise PlacementError(f"SPLITC_ADVICE is {given!r}; it must be a number of seconds, 0 for none") from None


# -- where the choice flips --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breakpoint:
    """What is chosen below `value` of a quantity, or from it on; `text` says which.  choice: "" where nothing fits.

    flips: whether it is another choice than now; if not, `value` is the last one that was looked at.
    """

    quantity: str
    value: float
    text: str
    choice: str
    flips: bool


def breakpoints(place: Place, program: Program) -> Iterator[Breakpoint]:
    """Yield how far down and up the present choice holds in each quantity, and where too little memory is left.

    A choice is a strategy with the sizes of its roles; in other worlds roles of all ranks count as equal, and so do
    those that read the data.
    """
    of_world = min(2, (place.cluster.world or inf) / place.world)
    spans = {"world": (1 / place.world, of_world), "memory": (1 / _MOST_MEMORY, 16)}
    for each in quantities(place, program)[:4]:
        down, up = map(each.reach, spans.get(each.name, (1 / 16, 16)))
        found = [_breakpoint(each, reach) for reach in (down, up) if reach]
        if each.name == "memory":
            found.insert(1, _breakpoint(each, down, bool))
        yield from dict.fromkeys(found)


def _breakpoint(
    quantity: Quantity, reach: list[float], holds: Callable[[Plan | None], object] | None = None
) -> Breakpoint:
    """Return where `holds` ends along `reach`; by default, where the choice flips."""
    now, below = _choice(quantity, quantity.plan(quantity.now)), reach[0] < quantity.now
    found = quantity.boundary(holds or (lambda plan: _choice(quantity, plan) == now), reach)
    if found is None:
        end, text = reach[-1], f"{'down' if below else 'up'} to {quantity.text(reach[-1])}"
        return Breakpoint(quantity.name, end, text, choice_text(quantity.plan(end)), False)
    last, first = found
    value, word = (last, "below") if below else (first, "from")
    return Breakpoint(quantity.name, value, f"{word} {quantity.text(value)}", choice_text(quantity.plan(first)), True)


def _choice(quantity: Quantity, plan: Plan | None) -> object:
    if plan is None or quantity.name != "world":
        return choice_text(plan)
    sizes = ["all" if len(ranks) == plan.world else len(ranks) for ranks in plan.all_roles.values()]
    return plan.strategy, sizes[1:]


def choice_text(plan: Plan | None) -> str:
    """`layer_separation 3+1`; "" without a plan."""
    return "" if plan is None else f"{plan.strategy} {'+'.join(str(len(ranks)) for ranks in plan.all_roles.values())}"


# -- ranks without work ------------------------------------------------------------------------------------------------


def advice(place: Place, program: Program, plan: Plan) -> str:
    """Return `3 of 4 ranks are idle: from 13.0 Gbit/s, 4 ranks are faster`; "" if none is, or a strategy was named.

    Where all work, it says whether one rank alone is as fast with as many examples.
    Raises TimeoutError when that takes more than half a minute, or SPLITC_ADVICE seconds.
    """
    idle = _idle(plan)
    if not isinstance(place.strategy, Auto):
        return ""
    if not idle:
        return _alone(place, program, plan)
    more = quantities(place, program, patient(planned))[:2]
    changes = [f"from {each.text(end[1])}" for each in more if (end := each.boundary(_idle, each.reach(_FAR)))]
    changes += _accumulating(place, program)
    head = _instead(place, program, plan) + f"{idle} of {plan.world} ranks {'is' if idle == 1 else 'are'} idle"
    nothing = f"; {_FAR} times the bandwidth, batch or accumulate would not change that."
    return head + (f": {' or '.join(changes)}, {plan.world} ranks are faster." if changes else nothing)


def _instead(place: Place, program: Program, plan: Plan) -> str:
    """Say which plan one rank takes the examples of, since it is as fast; "" where it has those of one reader."""
    batch, own = plan.global_batch, plan.prediction.step_seconds
    others = [each for each in plan.candidates if each.feasible and each.exact and each.strategy != plan.strategy]
    others = [each for each in others if each.global_batch == batch and place.global_batch is None]
    if batch == program.batch or not others:
        return ""
    best = min(others, key=lambda each: each.step_seconds)
    return (
        f"One rank alone takes {units.seconds(own)} for {batch} examples, {best.strategy} on several "
        f"{units.seconds(best.step_seconds)}: "
    )


def _alone(place: Place, program: Program, plan: Plan) -> str:
    """Say that one rank takes no longer for the same examples; "" where it does, or they do not fit there."""
    with suppress(PlacementError):
        one = replace(place, world=1, global_batch=plan.global_batch, pins={}).run(program)
        seconds, ours = simulated_step(one, place.cluster).step_seconds, plan.prediction.step_seconds
        if plan.world > 1 and seconds <= ours:
            return (
                f"One rank alone takes {units.seconds(seconds)} for all {plan.global_batch} examples, {plan.world} "
                f"ranks {units.seconds(ours)}: on this network more ranks are of use from larger batches on (a "
                f"single_device below has one reader's examples alone, so its samples/s are fewer)."
            )
    return ""


def _accumulating(place: Place, program: Program) -> Iterator[str]:
    """Yield the least of 2, 4, 8, ... batches to an update with which data parallelism is faster by simulation."""
    alone = place.run(program)
    with suppress(PlacementError):
        every = replace(place, strategy=DataParallel()).run(program)
        numbers = (2**k for k in range(1, _FAR.bit_length()))
        faster = (each for each in numbers if _rate(every, place.cluster, each) > _rate(alone, place.cluster, each))
        yield from (f"with accumulate={number}" for number in islice(faster, 1))


def _rate(program: PlacedProgram, cluster: Cluster, accumulate: int) -> float:
    return program.plan.global_batch / simulated_step(program, cluster, accumulate).step_seconds


def simulated_step(program: PlacedProgram, cluster: Cluster, accumulate: int | None = None) -> Timeline:
    """Return the simulated step of a placed program.  accumulate: batches to an update; None: as planned."""
    return simulate(lower_unchecked(program), cluster, _STEPS, accumulate=accumulate)


def simulated_figures(plan: Plan, step: Timeline) -> dict[str, Any]:
    """Return the seconds, samples/s, and bytes that the busiest rank sends, of a simulated step."""
    rate, sent = plan.global_batch / step.step_seconds, max(phases.sent_bytes for phases in step.phases)
    return {"step_seconds": step.step_seconds, "samples_per_second": rate, "sent_bytes": sent}


def _idle(plan: Plan | None) -> int:
    """How many ranks have no work; without a plan one at least."""
    return 1 if plan is None else plan.world - len(set().union(*plan.all_roles.values()))
