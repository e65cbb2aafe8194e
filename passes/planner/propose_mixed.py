"""Propose the plan that the pins describe layer by layer; all other layers are replicated and all-reduced.

It may have what the integer program does not look for: groups of several sizes, one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from splitc.errors import PlacementError
from splitc.passes.planner.assign_roles import LayerChoice, apply_pins, assign_roles
from splitc.passes.planner.pin_checks import MIXED, contradictions, shard_only_linear, too_small, unmet
from splitc.passes.planner.price_plan import price_plan
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible
from splitc.passes.planner.request import Request, smallest


def mixed(request: Request) -> PricedPlan:
    """The plan of the pins, where one of them asks for more than a role."""
    pins = request.pins.values()
    if not any(p.holding or p.group or p.split or p.sync in ("late_multiply", "parameter_server") for p in pins):
        return infeasible(MIXED, ["no pin asks for a holding or a sync"])
    choices = apply_pins(request, {layer.name: LayerChoice() for layer in request.program.layers})
    if why := too_small(request, MIXED) or contradictions(request, MIXED) or unmet(request, choices):
        return infeasible(MIXED, why)
    bounds = request.bounds(request.world)
    if not smallest(bounds):
        return idle(MIXED, bounds[-1], request.world)
    try:
        plan = assign_roles(request, MIXED, shard_only_linear(request, choices))
        return replace(price_plan(request, plan), proved=False)
    except PlacementError as error:
        return infeasible(MIXED, [str(error)])
