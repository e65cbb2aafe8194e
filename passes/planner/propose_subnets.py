"""Propose independent subnets: every rank trains its own part of the hidden neurons (IST, Yuan et al. 2019).

The layers from the first one with hidden neurons on are a role of their own, which evaluation divides over all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from splitc.errors import PlacementError
from splitc.ir.graph import info
from splitc.ir.neurons import Dealing
from splitc.ir.placements import LayerPlacement
from splitc.ir.strategies import IndependentSubnets
from splitc.passes.planner.assign_roles import LayerChoice, assign_roles
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.pin_checks import contradictions
from splitc.passes.planner.price_plan import price_plan
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request
from splitc.runtime.spec import Rounds


def independent_subnets(request: Request, options: IndependentSubnets) -> PricedPlan:
    """The plan that deals all hidden neurons."""
    program, world = request.program, request.world
    dealing = request.dealing
    why = contradictions(request, options.name) + unfit(dealing, world)
    rules = cut_rules(program)
    inside = following(rules, dealing.splits)
    why += [rules.reader_only[layer] for layer in inside & set(rules.reader_only)] if world > 1 else []
    if request.bounds(world)[-1] < world:
        why.append(f"{request.bounds(world)[-1]} examples cannot be shared out to {world} ranks")
    if why:
        return infeasible(options.name, why, exact=False)
    choices = {layer.name: LayerChoice(group=world if layer.name in inside else 1) for layer in program.layers}
    try:
        grouped = assign_roles(request, options.name, choices, "BK", exact=False)
    except PlacementError as error:
        return infeasible(options.name, [str(error)], exact=False)
    placements = {name: _placement(request, place, dealing, name) for name, place in grouped.placements.items()}
    rounds, insert_norm = Rounds(options.local_steps), bool(options.insert_norm)
    plan = replace(grouped, placements=placements, groups={}, rounds=rounds, insert_norm=insert_norm)
    return price_plan(request, plan)


def unfit(dealing: Dealing, world: int) -> list[str]:
    """Why these neurons cannot be trained as subnets: there are none, or their inputs are not normalised."""
    if not dealing.splits:
        return [
            f"no linear layer has hidden neurons to deal to {world} ranks: features that only linear layers read, by "
            f"way of elementwise functions, BatchNorm1d, sums and concatenations"
        ]
    bare = ", ".join(f"{info(node).layer} ({info(node).source})" for node in dealing.bare)
    return [
        f"no normalisation follows {bare}: a subnet sums 1/{world} of the inputs that the whole model sums, so it "
        f"learns another distribution (IST 3.3); add BatchNorm1d there, or ask for insert_norm=True"
    ] * bool(bare)


def _placement(request: Request, place: LayerPlacement, dealing: Dealing, layer: str) -> LayerPlacement:
    dealt = layer in dealing.splits
    sync = "average" if request.gradient_of(layer) and request.world > 1 else "none"
    if dealt:
        return replace(place, holding="subnet", split=dealing.splits[layer], sync=sync, group=None)
    return replace(place, sync=sync)
