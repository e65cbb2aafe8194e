"""What a layer computes in a step of a plan, whatever strategy it is from."""

from __future__ import annotations

from splitc.ir.features import features
from splitc.ir.plan import Plan
from splitc.passes.planner.request import Request
from splitc.passes.planner.syncs import sync_named
from splitc.runtime.collectives.layouts import State


def layer_seconds(request: Request, plan: Plan, layer: str) -> float:
    """Compute of a layer on the busiest rank of its role in one step.

    Groups of K compute on the examples of all members: a layer they share takes 1/K of it, another one all of it, but
    one in state batch on a rank's own.
    """
    place = plan.placements[layer]
    busy = len({rank for ranks in plan.roles.values() for rank in ranks})
    ranks = plan.roles[place.role]
    grouping = plan.groups.get(place.role)
    batch = max(plan.peak_batch(place.role, rank) for rank in (ranks[0], ranks[-1]))
    if grouping is None or (place.holding == "replicated" and place.state == State.BATCH):
        batch = plan.largest_batch(place.role)
    seconds = request.seconds(layer, batch, busy)
    if grouping is not None:
        seconds *= plan.turns(place.role)
        if place.holding == "sharded":
            seconds /= grouping.size
    for feature in features():
        seconds *= feature.part(request.program, plan, place, request.held[layer])[0]
    return seconds * sync_named(place.sync).work(len(ranks))
