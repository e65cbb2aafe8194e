"""Propose plans that train in rounds: units of ranks by themselves, which average their parameters after each round.

T = compute(largest share) + ring(parameters and statistics) / updates in a round
"""

from __future__ import annotations

from dataclasses import replace

from splitc.ir.strategies import LocalSGD
from splitc.passes.planner.priced_plan import PricedPlan, only_plan
from splitc.passes.planner.propose_replicated import on_all
from splitc.passes.planner.request import Request, largest
from splitc.runtime.spec import Rounds


def local_sgd(request: Request, options: LocalSGD) -> PricedPlan:
    """All layers on every rank, averaged after each `period` updates."""
    priced = on_all(request, options.name, request.world)
    if priced.plan is None:
        return priced
    placements = {
        name: replace(place, sync="average" if place.sync == "all_reduce" else place.sync)
        for name, place in priced.plan.placements.items()
    }
    plan = replace(priced.plan, placements=placements, rounds=Rounds(options.period))
    batch = largest(request.bounds(request.world))
    seconds = sum(request.seconds(layer, batch, request.world) for layer in placements)
    averaged = sum(request.gradient(layer) for layer in placements)
    if averaged:
        seconds += request.all_reduce_seconds(averaged, range(request.world)) / options.period
    return only_plan(plan, seconds, [priced.infeasible_because] if priced.infeasible_because else [])
