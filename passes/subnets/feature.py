"""Independent subnets, in the passes."""

from __future__ import annotations

from dataclasses import replace

from splitc.ir.placements import Grouping
from splitc.ir.plan import Plan
from splitc.passes.features import Feature
from splitc.passes.subnets.deal_neurons import DealNeurons


class Subnets(Feature):
    """What is dealt, and the shards in which the whole model is evaluated."""

    on_stages = (DealNeurons(),)
    needed = "subnets need the whole model in evaluation mode, divided over ranks"

    def evaluated(self, plan: Plan) -> Plan:
        dealt = {name: place for name, place in plan.placements.items() if place.holding == "subnet"}
        if not dealt:
            return plan
        (role,) = {place.role for place in dealt.values()}
        alone = {name: replace(each, holding="sharded", sync="none", group=plan.world) for name, each in dealt.items()}
        groups = {role: Grouping(plan.world, "BK")}
        return replace(plan, placements={**plan.placements, **alone}, groups=groups, rounds=None)


FEATURE = Subnets()
