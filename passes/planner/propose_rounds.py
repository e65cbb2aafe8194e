"""Propose plans that train in rounds: units of ranks by themselves, which average their parameters after each round.

T = compute(largest share) + ring or server(parameters) / updates in a round

Of fragments that travel during `delay` updates, only what takes longer than these counts.
"""

from __future__ import annotations

from dataclasses import replace

from splitc.cost_models.network.alpha_beta import ring_all_reduce, through_server
from splitc.ir.strategies import LocalSGD
from splitc.passes.planner.priced_plan import PricedPlan, only_plan
from splitc.passes.planner.propose_replicated import on_all
from splitc.passes.planner.request import Request, largest


def local_sgd(request: Request, options: LocalSGD) -> PricedPlan:
    """All layers on every rank, averaged after each `period` updates."""
    priced = on_all(request, options.name, request.world)
    rounds = options.rounds(unit=1)
    assert priced.plan is not None and rounds is not None
    placements = {
        name: replace(place, sync="average" if place.sync == "all_reduce" else place.sync)
        for name, place in priced.plan.placements.items()
    }
    plan = replace(priced.plan, placements=placements, rounds=rounds)
    seconds = sum(request.seconds(layer, largest(request.bounds(request.world)), request.world) for layer in placements)
    averaged = sum(request.gradient(layer) for layer in placements)
    if averaged:
        ranks, price = range(request.world), through_server if rounds.through == "server" else ring_all_reduce
        travels = price(averaged / rounds.fragments, len(ranks), request.all_reduce_link(ranks))
        seconds += max(0.0, travels - rounds.delay * seconds) * rounds.fragments / rounds.steps
    return only_plan(plan, seconds, [priced.infeasible_because] if priced.infeasible_because else [])
