"""Offers of what no one strategy has: what the pins ask for layer by layer, all else replicated and all-reduced."""

from __future__ import annotations

from splitc.passes.planner.arrange import LayerChoice, with_pins
from splitc.passes.planner.fitting import too_small, unfit, whole_unless_linear
from splitc.passes.planner.pins import MIXED, contradictions
from splitc.passes.planner.pricing import Pricing
from splitc.passes.planner.request import Offer


def mixed(pricing: Pricing) -> Offer:
    """The plan of the pins, where one of them asks for more than a role."""
    request = pricing.request
    asked = [pin.placement for pin in request.pins.values()]
    if not any(p.holding or p.group or p.split or p.sync in ("late_multiply", "parameter_server") for p in asked):
        return Offer(MIXED, feasible=False, why="no pin asks for a holding or a sync")
    wishes = with_pins(request, {layer.name: LayerChoice() for layer in request.program.layers})
    if why := too_small(request, MIXED) or contradictions(request.pins, MIXED) or unfit(request, wishes):
        return Offer(MIXED, feasible=False, why="; ".join(why))
    return pricing.arranged(MIXED, whole_unless_linear(request, wishes))
