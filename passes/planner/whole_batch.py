"""Let the layer that needs the whole global batch see it: a role of its own, one group of all ranks of its role.

    roles {all: 0 to 3}   ->   roles {all: 0 to 3, in_batch: 0 to 3}, groups {in_batch: Grouping(4, "BK")}

Its ranks gather the examples by `modulo` and compute the same, so that its gradients need no sum.  Where one rank runs
the layer (the fc rank of a separation) the plan stays as it is.  In rounds the batch is that of a unit, and so is the
group.
"""

from __future__ import annotations

from dataclasses import replace

from splitc.errors import PlacementError
from splitc.ir.placements import Grouping
from splitc.ir.plan import Plan
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request
from splitc.passes.planner.wire_price import step_seconds
from splitc.passes.rewriting import lower_unchecked


def with_whole_batch(request: Request, priced: PricedPlan) -> PricedPlan:
    """The plan in which the in-batch layer sees the whole batch, with its price; infeasible where there is none."""
    layer, plan = request.program.in_batch, priced.plan
    if not layer or plan is None or not priced.feasible or plan.sees_whole_batch(layer):
        return priced
    if plan.placements[layer].holding != "replicated":
        return infeasible(plan.strategy, [f"{layer} needs the whole batch, so it is not divided"], priced.exact)
    gathered = gathered_plan(plan, layer)
    try:
        more = _seconds(request, gathered) - _seconds(request, plan)
    except PlacementError as error:
        return infeasible(plan.strategy, [str(error)], priced.exact)
    seconds = priced.seconds + more
    bound = gathered.global_batch / seconds if seconds else 0.0
    return replace(priced, plan=gathered, seconds=seconds, bound=bound, proved=False, separation=None)


def gathered_plan(plan: Plan, layer: str) -> Plan:
    """The plan with `layer` in a role of its own, on the same ranks in one group."""
    role = plan.placements[layer].role
    ranks = plan.roles[role]
    groups = {name: Grouping(group.size, "BK") if name == role else group for name, group in plan.groups.items()}
    sync = "average" if plan.rounds and plan.placements[layer].sync != "none" else "none"
    alone = replace(plan.placements[layer], role=layer, sync=sync)
    return replace(
        plan,
        roles={**plan.roles, layer: ranks},
        batch_offsets={**plan.batch_offsets, layer: plan.batch_offsets[role]},
        groups={**groups, layer: Grouping(min(len(ranks), plan.unit_size), "BK")},
        placements={**plan.placements, layer: alone},
    )


def _seconds(request: Request, plan: Plan) -> float:
    return step_seconds(request, lower_unchecked(request.program.placed(plan)))
