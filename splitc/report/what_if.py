"""Plan a request again with more or less of something: where the choice flips, what fits, and what uses all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, sqrt
from operator import eq

from splitc import units
from splitc.cost_models.memory.memory_check import require_memory_on
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.ir.strategies import Auto
from splitc.ir.strategy import in_microbatches
from splitc.passes.place import Place
from splitc.passes.rewriting import lower_unchecked
from splitc.report.figures import roles_of

_PRECISION = 0.03  # of a breakpoint
_FAR = 64  # times the bandwidth or the batch, for advice
_MOST_MEMORY = 2**30  # times what a rank has


@dataclass(frozen=True)
class Quantity:
    """A number in a request that its plan depends on.

    now: its value.  text: a value in words.  whole: it is a whole number.  change: the request with another value.
    """

    name: str
    now: float
    text: Callable[[float], str]
    whole: bool
    change: Callable[[float], tuple[Place, Program]]
    plans: dict[float, Plan | None] = field(default_factory=dict, repr=False)

    def plan(self, value: float) -> Plan | None:
        """The plan that is chosen at a value; None when nothing fits."""
        if value not in self.plans:
            place, program = self.change(value)
            try:
                self.plans[value] = place.run(program).plan
            except PlacementError:
                self.plans[value] = None
        return self.plans[value]

    def boundary(self, holds: Callable[[float], bool], reach: Iterable[float]) -> tuple[float, float] | None:
        """Return the last value at which `holds` and the first at which it does not, to 3 %, going along `reach`.

        It holds now.  None: it does so all along.
        """
        last = self.now
        for first in reach:
            if not holds(first):
                break
            last = first
        else:
            return None
        while abs(first - last) > max(_PRECISION * min(first, last), self.whole):
            middle = (first + last) // 2 if self.whole else sqrt(first * last)
            last, first = (middle, first) if holds(middle) else (last, middle)
        return last, first

    def reach(self, factor: float, most: float = inf) -> list[float]:
        """Return values ever farther from it, up or down to `factor` times it; whole ones from 1 to `most`."""
        powers = [2**k for k in range(64) if 2**k <= max(factor, 1 / factor)]
        values = [self.now * power if factor > 1 else self.now / power for power in powers]
        if self.name == "world":  # which differ in what divides them
            values = [self.now + (2**k if factor > 1 else -(2**k)) for k in range(int(self.now).bit_length())] + values
        if self.whole:
            values = sorted((max(1, min(round(value), most)) for value in values), reverse=factor < 1)
        return [value for value in dict.fromkeys(values) if value != self.now]


def quantities(place: Place, program: Program) -> tuple[Quantity, Quantity, Quantity, Quantity]:
    """Return what the choice depends on: bandwidth between hosts, batch, world, memory of a rank."""

    def batch(value: float) -> tuple[Place, Program]:
        if place.global_batch is None:
            return place, replace(program, batch=int(value))
        return replace(place, global_batch=int(value)), program

    def at(name: str, value: object) -> tuple[Place, Program]:
        return replace(place, **{name: value}), program  # type: ignore[arg-type]

    cluster, of_batch = place.cluster, "a global batch of {:.0f}" if place.global_batch else "{:.0f} examples a reader"
    link, memory = cluster.link.bandwidth, place.memory or cluster.device_for(place.world).memory
    return (
        Quantity("bandwidth", link, units.bandwidth, False, lambda x: at("cluster", cluster.with_bandwidth(x))),
        Quantity("batch", place.global_batch or program.batch, of_batch.format, True, batch),
        Quantity("world", place.world, lambda x: units.numbered(int(x), "rank"), True, lambda x: at("world", int(x))),
        Quantity("memory", memory, units.nbytes, False, lambda x: at("memory", x)),
    )


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
    for each in quantities(place, program):
        same = partial(eq, _choice(each, each.now))
        down, up = each.reach(1 / 16), each.reach(16)
        if each.name == "world":
            down, up = each.reach(1 / each.now), each.reach(2, place.cluster.world or inf)
        if each.name == "memory":
            down = each.reach(1 / _MOST_MEMORY)
        found = [_breakpoint(each, same, reach, below) for reach, below in ((down, True), (up, False)) if reach]
        if each.name == "memory" and found[0].choice:
            found.insert(1, _breakpoint(each, bool, down, True))
        yield from found


def _breakpoint(quantity: Quantity, holds: Callable[[object], bool], reach: list[float], below: bool) -> Breakpoint:
    found = quantity.boundary(lambda value: holds(_choice(quantity, value)), reach)
    if found is None:
        end, text = reach[-1], f"{'down' if below else 'up'} to {quantity.text(reach[-1])}"
        return Breakpoint(quantity.name, end, text, choice_text(quantity.plan(end)), False)
    last, first = found
    value, word = (last, "below") if below else (first, "from")
    return Breakpoint(quantity.name, value, f"{word} {quantity.text(value)}", choice_text(quantity.plan(first)), True)


def _choice(quantity: Quantity, value: float) -> object:
    plan = quantity.plan(value)
    if plan is None or quantity.name != "world":
        return choice_text(plan)
    sizes = ["all" if len(ranks) == plan.world else len(ranks) for ranks in roles_of(plan).values()]
    return plan.strategy, sizes[1:]


def choice_text(plan: Plan | None) -> str:
    """`layer_separation 3+1`; "" without a plan."""
    return "" if plan is None else f"{plan.strategy} {'+'.join(str(len(ranks)) for ranks in roles_of(plan).values())}"


# -- ranks without work ------------------------------------------------------------------------------------------------


def advice(place: Place, program: Program, plan: Plan) -> str:
    """Return `3 of 4 ranks are idle: from 13.0 Gbit/s, 4 ranks are faster`; "" if none is, or a strategy was named."""
    idle = _idle(plan)
    if not idle or not isinstance(place.strategy, Auto):
        return ""
    bandwidth, batch, *_ = quantities(place, program)
    found = ((each, each.boundary(partial(_leaves_idle, each), each.reach(_FAR))) for each in (bandwidth, batch))
    changes = [f"from {each.text(limits[1])}" for each, limits in found if limits]
    head = f"{idle} of {plan.world} ranks {'is' if idle == 1 else 'are'} idle"
    if not changes:
        return f"{head}; {_FAR} times the bandwidth, or the batch, would not change that."
    return f"{head}: {' or '.join(changes)}, {plan.world} ranks are faster."


def _idle(plan: Plan) -> int:
    return plan.world - len(set().union(*roles_of(plan).values()))


def _leaves_idle(quantity: Quantity, value: float) -> bool:
    plan = quantity.plan(value)
    return plan is None or _idle(plan) > 0


# -- what fits ---------------------------------------------------------------------------------------------------------


def what_fits(place: Place, program: Program) -> str:
    """Return the smallest changes with which a request would fit; "" if memory is not all that it lacks."""
    _, batch, world, memory = quantities(place, program)
    if not _fits(*memory.change(memory.now * _MOST_MEMORY)):
        return ""

    def least(each: Quantity, reach: list[float]) -> str:
        found = each.boundary(lambda value: not _fits(*each.change(value)), reach)
        return "" if found is None else each.text(found[1])

    numbers = (2, 4, 8, 16) if place.strategy.microbatches is None else ()
    parted = {number: replace(place, strategy=in_microbatches(place.strategy, number)) for number in numbers}
    changes = [
        f"{least(memory, memory.reach(_MOST_MEMORY))} a rank",
        next((f"microbatches={number}" for number, each in parted.items() if _fits(each, program)), ""),
        least(world, world.reach(8, place.cluster.world or inf)),
        least(batch, batch.reach(1 / batch.now)),
    ]
    has = f"a rank has {memory.text(memory.now)}"
    return f"memory is what is short: {has}; it would fit with {', or '.join(filter(None, changes))}"


def _fits(place: Place, program: Program) -> bool:
    """Whether there is a plan of which every rank has memory for a step."""
    try:
        require_memory_on(lower_unchecked(place.run(program)), place.cluster, place.memory)
    except PlacementError:
        return False
    return True
