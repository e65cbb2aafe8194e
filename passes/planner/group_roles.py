"""Make groups of the ranks of a separation's roles, where pins ask for them; the planner makes none itself.

With the pin `{"classifier*": Placement(group=2, split="columns")}`:

    roles {conv: 0 to 5, fc: 6 7}   ->   roles {conv: 0 to 5, fc: 6 7}, groups {fc: Grouping(2, "BK")}
"""

from __future__ import annotations

from dataclasses import replace

from splitc.checks.graph import tied_are_replicated
from splitc.ir.placements import Grouping, LayerPlacement
from splitc.passes.planner.assign_roles import LayerChoice, apply_pins, layer_placement
from splitc.passes.planner.pin_checks import shard_only_linear, unmet
from splitc.passes.planner.pins import Pin
from splitc.passes.planner.price_choices import price_plan
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request
from splitc.runtime.collectives.layouts import State


def asks_for_groups(pin: Pin | None) -> bool:
    """Whether a pin asks for what only ranks in groups have."""
    if pin is None:
        return False
    return bool((pin.group or 1) > 1 or pin.holding == "sharded" or pin.split or pin.state or pin.arrives)


def group_size(request: Request, ranks: int) -> int:
    """The size of the groups that pins ask for in a role of so many ranks: all of it where none says one."""
    return next((pin.group for pin in request.pins.values() if pin.group is not None and pin.group > 1), ranks)


def may_group(request: Request, ranks: int) -> bool:
    """Whether so many ranks form groups as pins ask for, if they do."""
    size = group_size(request, ranks)
    return not any(map(asks_for_groups, request.pins.values())) or (1 < size <= ranks and ranks % size == 0)


def in_groups(request: Request, priced: PricedPlan) -> PricedPlan:
    """The separation with the groups that pins ask for, priced by its wire; infeasible where it cannot have them.

    Layers of such a role that no pin names run alike on all ranks of a group.
    """
    plan = priced.plan
    if plan is None or not priced.feasible or not any(map(asks_for_groups, request.pins.values())):
        return priced
    groups: dict[str, Grouping] = {}
    placements: dict[str, LayerPlacement] = {}
    why: list[str] = []
    for role, ranks in plan.roles.items():
        layers = [layer for layer, place in plan.placements.items() if place.role == role]
        pins = {layer: request.pins[layer] for layer in layers if layer in request.pins}
        if not any(map(asks_for_groups, pins.values())):
            placements |= {layer: plan.placements[layer] for layer in layers}
            continue
        part = replace(request, world=len(ranks), pins=pins)
        size = group_size(part, len(ranks))
        grouped = LayerChoice(group=size)
        choices = apply_pins(part, dict.fromkeys(layers, grouped), grouped)
        why += unmet(part, choices, size)
        for layer, choice in shard_only_linear(request, choices).items():
            if choice.group == 1:  # as the pin says: each rank of a group by itself
                choice = replace(choice, group=size, state=State.BATCH)
            placements[layer] = layer_placement(request, layer, role, choice, len(ranks))
        groups[role] = Grouping(size, "BK")
    plan = replace(plan, groups=groups, placements=placements)
    why += tied_are_replicated(request.program.placed(plan))
    return infeasible(plan.strategy, why) if why else price_plan(request, plan)
