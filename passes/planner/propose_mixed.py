"""Propose the plan that the pins describe layer by layer; all other layers are replicated and all-reduced."""

from __future__ import annotations

from splitc.passes.planner.assign_roles import LayerChoice, apply_pins
from splitc.passes.planner.pin_checks import MIXED, contradictions, shard_only_linear, too_small, unmet
from splitc.passes.planner.price_choices import price_choices
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request


def mixed(request: Request) -> PricedPlan:
    """The plan of the pins, where one of them asks for more than a role."""
    pins = request.pins.values()
    if not any(p.holding or p.group or p.split or p.sync in ("late_multiply", "parameter_server") for p in pins):
        return infeasible(MIXED, ["no pin asks for a holding or a sync"])
    choices = apply_pins(request, {layer.name: LayerChoice() for layer in request.program.layers})
    if why := too_small(request, MIXED) or contradictions(request, MIXED) or unmet(request, choices):
        return infeasible(MIXED, why)
    return price_choices(request, MIXED, shard_only_linear(request, choices))
