"""Price a plan that is only considered.

The choices for the layers become roles (`assign_roles`), the plan is lowered as a chosen one is, and `wire_price`
prices what the lowered program computes and communicates.
"""

from __future__ import annotations

from collections.abc import Mapping

from splitc.cost_models.memory.memory import exchanged_nbytes
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.passes.planner.assign_roles import LayerChoice, assign_roles
from splitc.passes.planner.priced_plan import PricedPlan, infeasible, shortage
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.split_by_rows import split_by_rows
from splitc.passes.planner.wire_price import step_seconds
from splitc.passes.rewriting import lower_unchecked
from splitc.runtime.spec import Rounds


def price_choices(
    request: Request,
    strategy: str,
    choices: Mapping[str, LayerChoice],
    scheme: str = "B/K",
    updates: str = "once",
    exact: bool = True,
    rounds: Rounds | None = None,
) -> PricedPlan:
    """The plan that the choices make, priced; infeasible where they contradict each other or do not fit."""
    try:
        plan = assign_roles(request, strategy, split_by_rows(request, choices), scheme, updates, exact, rounds)
    except PlacementError as error:
        return infeasible(strategy, [str(error)], exact)
    if not smallest(request.bounds(request.world)):
        why = f"{plan.global_batch} examples leave some of {request.world} ranks without any"
        return PricedPlan(strategy, plan, infeasible_because=why, exact=exact)
    return price_plan(request, plan)


def price_plan(request: Request, plan: Plan, proved: bool = False) -> PricedPlan:
    """A plan, priced by what it computes and puts on the wire; infeasible where it does not fit."""
    strategy, exact = plan.strategy, plan.exact
    try:
        program = lower_unchecked(request.program.placed(plan))
        seconds = step_seconds(request, program)
    except PlacementError as error:
        return PricedPlan(strategy, plan, infeasible_because=str(error), exact=exact)
    need, layers = memory_needed(request, program)
    roles = plan.roles_of(0)
    why = "; ".join(shortage(roles, plan.ranks_by_roles[roles], need, request.memory_of(request.world), layers))
    bound = 0.0 if why or not seconds else plan.global_batch / seconds
    return PricedPlan(strategy, plan, seconds, bound, proved, infeasible_because=why, exact=exact)


def memory_needed(request: Request, program: LoweredProgram) -> tuple[float, dict[str, float]]:
    """Bytes that rank 0 needs, which has every role, and those that each layer needs there."""
    plan = program.plan
    needed, names = {}, list(plan.roles)
    for name, place in plan.placements.items():
        later = len(names) - names.index(place.role) - 1
        batch = request.live(plan.peak_batch(place.role, plan.roles[place.role][0]), later)
        needed[name] = request.layer_memory(name, batch, place.sync == "all_reduce") / place.num_shards
        if place.holding == "subnet":  # a slice of it, beside the part that the rank owns between rounds
            owned = sum(h.nbytes * (1 + request.optimizer_copies * h.trainable) for h in request.held[name])
            needed[name] = needed[name] * request.subnet_share(name) + owned / plan.world
    return sum(needed.values()) + exchanged_nbytes(program, 0) + _accumulated_nbytes(request, plan), needed


def _accumulated_nbytes(request: Request, plan: Plan) -> float:
    """Bytes of the largest gradient of a microbatch before it is added to the sum; 0 with one microbatch."""
    accumulating = {role for role, grouping in plan.groups.items() if grouping.num_microbatches > 1}
    return max(
        (
            request.gradient(name) / place.num_shards
            for name, place in plan.placements.items()
            if place.role in accumulating
        ),
        default=0.0,
    )
