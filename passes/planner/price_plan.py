"""Price a plan that no integer program chose: its memory by layers, its step by the simulation."""

from __future__ import annotations

from dataclasses import replace

from splitc.checks.batch_sizes import step_problems
from splitc.checks.graph import tied_are_replicated
from splitc.cost_models.memory.memory import exchanged_nbytes
from splitc.errors import PlacementError
from splitc.ir.features import features
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.program import LoweredProgram
from splitc.passes.planner.priced_plan import PricedPlan, priced_plan, shortage
from splitc.passes.planner.request import Request
from splitc.passes.planner.syncs import sync_misfits
from splitc.passes.rewriting import lower_unchecked


def price_plan(request: Request, plan: Plan) -> PricedPlan:
    """The plan in the order asked for, with its prices; infeasible where it makes no sense or does not fit."""
    plan = request.order.of(plan)
    if why := problems_of(request, plan):
        return PricedPlan(plan.strategy, plan, infeasible_because="; ".join(why), exact=plan.exact)
    try:
        program = lower_unchecked(request.program.placed(plan))
    except PlacementError as error:
        return PricedPlan(plan.strategy, plan, infeasible_because=str(error), exact=plan.exact)
    need, layers = memory_needed(request, program)
    roles = plan.roles_of(0)
    return priced_plan(
        request, plan, shortage(roles, plan.ranks_by_roles[roles], need, request.memory_of(request.world), layers)
    )


def problems_of(request: Request, plan: Plan) -> list[str]:
    """What contradicts itself in a plan, or cannot be in its pieces and groups; once for layers placed alike."""
    firsts = {place: layer for layer, place in reversed([*plan.placements.items()])}
    return [
        *decision_problems(replace(plan, placements={layer: place for place, layer in firsts.items()})),
        *step_problems(request.program, plan),
        *sync_misfits(request.program, plan),
        *(tied_are_replicated(request.program.placed(plan)) if plan.groups else ()),
    ]


def memory_needed(request: Request, program: LoweredProgram) -> tuple[float, dict[str, float]]:
    """Bytes that rank 0 needs, which has every role, and those that each layer needs there."""
    plan = program.plan
    needed, names = {}, list(plan.roles)
    for name, place in plan.placements.items():
        later = len(names) - names.index(place.role) - 1
        batch = request.live(plan.peak_batch(place.role, plan.roles[place.role][0]), later)
        needed[name] = request.layer_memory(name, batch, place.sync == "all_reduce") / place.num_shards
        owned = sum(h.nbytes * (1 + request.optimizer_copies * h.trainable) for h in request.held[name])
        for feature in features():
            computed, kept = feature.part(request.program, plan, place, request.held[name])
            needed[name] = needed[name] * computed + owned * kept
    return sum(needed.values()) + exchanged_nbytes(program, 0) + _accumulated_nbytes(request, plan), needed


def _accumulated_nbytes(request: Request, plan: Plan) -> float:
    """Bytes of the largest gradient of a microbatch before it is added to the sum; 0 with one microbatch."""
    accumulating = {role for role, grouping in plan.groups.items() if grouping.turns > 1}
    return max(
        (
            request.gradient(name) / place.num_shards
            for name, place in plan.placements.items()
            if place.role in accumulating
        ),
        default=0.0,
    )
