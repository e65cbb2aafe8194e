"""Propose plans that train in rounds: every rank by itself, and an average of all after each round."""

from __future__ import annotations

from dataclasses import replace

from splitc.ir.strategies import LocalSGD
from splitc.passes.planner.pin_checks import contradictions, unsummed
from splitc.passes.planner.priced_plan import PricedPlan, priced_plan, shortage
from splitc.passes.planner.request import Request, largest


def local_sgd(request: Request, options: LocalSGD) -> PricedPlan:
    """All layers on every rank, averaged after each `period` updates."""
    layers, ranks = [layer.name for layer in request.program.layers], tuple(range(request.world))
    bounds = request.bounds(request.world)
    plan = request.replicated_plan(options.name, {"all": ranks}, {"all": bounds}, dict.fromkeys(layers, "all"))
    placements = {
        name: replace(place, sync="average" if place.sync == "all_reduce" else place.sync)
        for name, place in plan.placements.items()
    }
    problems = contradictions(request, options.name)
    if request.world > 1:
        problems += unsummed(request, layers)
    if bounds[-1] < request.world:
        problems.append(f"{bounds[-1]} examples cannot be shared out to {request.world} ranks")
    needed = {layer: request.layer_memory(layer, request.live(largest(bounds)), request.world > 1) for layer in layers}
    problems += shortage(("all",), ranks, sum(needed.values()), request.memory_of(request.world), needed)
    return priced_plan(request, replace(plan, placements=placements, rounds=options.rounds(unit=1)), problems)
