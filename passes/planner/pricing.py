"""From wishes to an offer: how a plan that is only considered gets its price.

The wishes become roles (`arrange`), the plan is rewritten as a chosen one is, and `wire_price` prices what its program
would compute and put on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitc.cost_models.memory.memory import exchanged_nbytes
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.passes.planner.arrange import Arrangement, LayerChoice, arrange
from splitc.passes.planner.request import Offer, Request, shortage, smallest
from splitc.passes.planner.rows import with_rows
from splitc.passes.planner.wire_price import step_seconds
from splitc.passes.rewriting import lower_unchecked


@dataclass(frozen=True)
class Pricing:
    """Price plans for one request."""

    request: Request

    def arranged(
        self,
        strategy: str,
        wishes: Mapping[str, LayerChoice],
        scheme: str = "B/K",
        updates: str = "once",
        exact: bool = True,
    ) -> Offer:
        """The wishes as a priced plan; infeasible where they contradict each other or do not fit."""
        try:
            made = arrange(self.request, with_rows(self.request, wishes), scheme, updates)
            return self.offer(strategy, made, exact)
        except PlacementError as error:
            return Offer(strategy, feasible=False, why=str(error), exact=exact)

    def offer(self, strategy: str, made: Arrangement, exact: bool = True) -> Offer:
        """The arrangement as a priced plan of `strategy`; infeasible where a rank has too little memory."""
        request = self.request
        plan = Plan(
            strategy,
            request.world,
            made.roles,
            made.placements,
            made.examples,
            groups=made.groups,
            all_reduce=request.all_reduce,
        )
        empty = Offer(strategy, feasible=False, roles=made.roles, examples=made.examples, exact=exact)
        if not smallest(request.bounds(request.world)):
            return replace(empty, why=f"{plan.global_batch} examples leave some of {request.world} ranks without any")
        try:
            program = lower_unchecked(request.program.placed(plan))
            seconds = step_seconds(request, program)
        except PlacementError as error:
            return replace(empty, why=str(error))
        need, layers = memory_needed(request, program)
        roles = plan.roles_of(0)
        why = shortage(roles, plan.ranks_by_roles[roles], need, request.memory_of(request.world), layers)
        return Offer(
            strategy,
            feasible=not why,
            why="; ".join(why),
            roles=made.roles,
            examples=made.examples,
            role_of={name: place.role for name, place in made.placements.items()},
            step_seconds=seconds,
            most=0.0 if why or not seconds else plan.global_batch / seconds,
            searched=False,
            placements=made.placements,
            groups=made.groups,
            exact=exact,
        )


def memory_needed(request: Request, program: LoweredProgram) -> tuple[float, dict[str, float]]:
    """Bytes that rank 0 needs, which has every role, and those that each layer needs there."""
    plan = program.plan
    needed = {}
    for name, place in plan.placements.items():
        batch = plan.peak_batch(place.role, plan.roles[place.role][0])
        needed[name] = request.layer_memory(name, batch, place.sync == "all_reduce") / place.num_shards
    return sum(needed.values()) + exchanged_nbytes(program, 0) + _added_nbytes(request, plan), needed


def _added_nbytes(request: Request, plan: Plan) -> float:
    """The largest gradient of a turn, which lives beside the one that it is added to; nothing without turns."""
    turned = {role for role, grouping in plan.groups.items() if grouping.num_microbatches > 1}
    return max(
        (request.gradient(name) / place.num_shards for name, place in plan.placements.items() if place.role in turned),
        default=0.0,
    )
