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
from splitc.ir.program import Program


def with_whole_batch(program: Program, plan: Plan) -> Plan:
    """The plan in which the in-batch layer sees the whole batch.

    Raises PlacementError where that layer is divided.
    """
    layer = program.in_batch
    if not layer or plan.sees_whole_batch(layer):
        return plan
    if plan.placements[layer].holding != "replicated":
        raise PlacementError(f"{layer} needs the whole batch, so it is not divided")
    return gathered_plan(plan, layer)


def gathered_plan(plan: Plan, layer: str) -> Plan:
    """The plan with `layer` in a role of its own, on the same ranks in one group."""
    role = plan.placements[layer].role
    ranks = plan.roles[role]
    groups = {name: Grouping(group.size, "BK") if name == role else group for name, group in plan.groups.items()}
    sync = "average" if plan.trains_in_units and plan.placements[layer].sync != "none" else "none"
    return replace(
        plan,
        roles={**plan.roles, layer: ranks},
        batch_offsets={**plan.batch_offsets, layer: plan.batch_offsets[role]},
        groups={**groups, layer: Grouping(len(plan.together(role, ranks[0])), "BK")},
        placements={**plan.placements, layer: replace(plan.placements[layer], role=layer, sync=sync, state=None)},
    )
