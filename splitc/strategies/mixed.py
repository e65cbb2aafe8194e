"""The whole space, and the plan that pins describe layer by layer; all other layers are replicated and all-reduced.

That plan may have what the integer program does not look for: groups of several sizes, one after the other.  A layer
runs on all ranks, each with its own examples, or on all ranks in groups, or on one rank.  Consecutive layers in one
kind of place are one role; a value that returns to an earlier kind of place starts a new role, so that every role runs
once in a step:

    conv (all)  conv (all)  fc6 (groups of 2)  fc7 (all)   fc8 (rank 0)
    `----- stage0 ----'     `--- stage1 ----'  `- stage2 '  `- stage3 -'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.placements import SYNCS_OF_A_LAYER, Grouping, LayerPlacement
from splitc.ir.plan import Plan
from splitc.passes.planner.cuts import CutRules, cut_rules
from splitc.passes.planner.divisions import FEW, Division, all_ranks, group_sizes
from splitc.passes.planner.order import Order
from splitc.passes.planner.pin_checks import PinWords, contradictions, too_small, unmet, unsummed
from splitc.passes.planner.pins import UNPINNED, Pin
from splitc.passes.planner.price_plan import price_plan
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible
from splitc.passes.planner.problem import Option
from splitc.passes.planner.registry import STRATEGIES
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.strategy import Strategy
from splitc.runtime.collectives.layouts import State
from splitc.strategies.layer_separation import separations_in_groups

ALL, ONE = 1, 0
"""Where a layer runs: on all ranks, in groups of as many as another number says, or on rank 0 alone."""

MICROBATCHES = (2, 3, 4)
"""Numbers of pieces of a batch that are tried where none was asked for."""


@dataclass(frozen=True)
class Mixed(Strategy):
    """What pins ask for, layer by layer; all other layers are replicated and all-reduced."""

    name = "mixed"
    spans = True
    pins = PinWords(stages=2, syncs=SYNCS_OF_A_LAYER, divides=True)

    def proposals(self, request: Request) -> list[PricedPlan]:
        return [_of_pins(request)]

    def searches(self, by_name: bool) -> Sequence[bool]:
        return () if by_name else (False,)

    def divisions(self, request: Request) -> Iterator[Division]:
        """Two roles on ranks of their own or on all ranks, groups of any size, any microbatches."""
        yield (one := all_ranks(request))
        (role,) = one.roles
        grouped = (Division((role, replace(role, group=size))) for size in group_sizes(request.world))
        for pair in chain(grouped, separations_in_groups(request)):
            yield pair
            for m in MICROBATCHES[-1 if request.world > FEW else 0 :] if not request.program.in_batch else ():
                if m <= smallest(pair.roles[0].bounds):
                    yield replace(pair, order=Order(m))

    def allows(self, option: Option, pin: Pin) -> bool:
        if pin.holding or pin.split:
            return option.state == pin.state  # which is a part of the pin: None is a state of its own
        return option.state != "replicate" or pin.state == "replicate"


def _of_pins(request: Request) -> PricedPlan:
    """The plan of the pins, where one of them asks for more than a role."""
    name, pins = Mixed.name, request.pins.values()
    if not any(p.holding or p.group or p.split or p.sync in STRATEGIES for p in pins):
        roles = f"; use layer_separation for the role of {', '.join(request.pins)}" if pins else ""
        return infeasible(name, [f"no pin asks for a holding or a sync{roles}"])
    if why := too_small(request, name) or contradictions(request, name, Mixed.pins):
        return infeasible(name, why)
    where = {layer.name: where_to_run(request, layer.name) for layer in request.program.layers}
    copied = [layer for layer, size in where.items() if size != ONE and request.world > size]
    if why := unmet(request, request.world) + unsummed(request, copied):
        return infeasible(name, why)
    bounds = request.bounds(request.world)
    if not smallest(bounds):
        return idle(name, bounds[-1], request.world)
    try:
        return replace(price_plan(request, plan_of(request, where)), proved=False)
    except PlacementError as error:
        return infeasible(name, [str(error)])


def where_to_run(request: Request, layer: str) -> int:
    """Where its pin puts a layer; groups without a size are the smallest that divide the world."""
    pin = request.pins.get(layer, UNPINNED)
    if pin.divides:
        return pin.group or next(size for size in range(2, request.world + 1) if request.world % size == 0)
    return ONE if pin.stage == 1 else pin.group or ALL


def plan_of(request: Request, where: Mapping[str, int]) -> Plan:
    """The plan with the roles that these places make.

    Raises PlacementError when layers that cannot be separated are in different places.
    """
    program, world, bounds = request.program, request.world, request.bounds(request.world)
    levels = _levels(where, cut_rules(program))
    keys = {layer: (levels[layer], size == ONE, size) for layer, size in where.items()}
    ordered = sorted({*keys.values()})
    if (0, False, ALL) not in ordered:
        ordered.insert(0, (-1, False, ALL))  # a role must read the data
    names = dict(zip(ordered, request.role_names(len(ordered)), strict=True))
    in_turns = None if any(pin.state for pin in request.pins.values()) else keys.get(info(program.loss).layer)
    groups = {role: Grouping(key[2], "B/K" if key == in_turns else "BK") for key, role in names.items() if key[2] > 1}
    return Plan(
        Mixed.name,
        world,
        {role: (0,) if alone else tuple(range(world)) for (_, alone, _), role in names.items()},
        {layer: _placement(request, layer, names[key], where[layer]) for layer, key in keys.items()},
        {role: (0, bounds[-1]) if alone else bounds for (_, alone, _), role in names.items()},
        groups=groups,
        all_reduce=request.all_reduce,
    )


def _placement(request: Request, layer: str, role: str, where: int) -> LayerPlacement:
    """The placement of a layer in its role; one that has nothing to divide is whole in its group."""
    pin = request.pins.get(layer, UNPINNED)
    divided = pin.divides and layer in request.divisible
    state, arrives = (pin.state, pin.arrives) if where > 1 else (None, None)
    once = where == ONE or (where == request.world and (divided or state != State.BATCH))  # one copy of it is trained
    sync = "none" if once or not request.gradient_of(layer) or pin.sync == "none" else pin.sync or "all_reduce"
    if not divided:
        return LayerPlacement(role, "replicated", sync, state=state, arrives=arrives)
    return LayerPlacement(role, "sharded", sync, where, pin.split or "columns", state, arrives)


def _levels(where: Mapping[str, int], rules: CutRules) -> dict[str, int]:
    """How often the place changes on the way to each layer, at most."""
    for (i, j), why in rules.together.items():
        if where[i] != where[j]:
            raise PlacementError(f"{i} and {j} cannot be in different places: {why}")
    for layer, why in rules.reader_only.items():
        if where[layer] != ALL:
            raise PlacementError(f"{layer} must be where the data is read: {why}")
    levels = dict.fromkeys(where, 0)
    for _ in range(len(levels) + 1):
        before = dict(levels)
        for i, j in rules.order:
            levels[j] = max(levels[j], levels[i] + (where[i] != where[j]))
        for i, j in rules.together:
            levels[i] = levels[j] = max(levels[i], levels[j])
        if levels == before:
            return levels
    why = next(why for (i, _), why in rules.together.items() if levels[i] != before[i])
    raise PlacementError(f"layers that cannot be separated lie before and after layers in another place: {why}")
