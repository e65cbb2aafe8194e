"""Independent subnets: every rank trains its own part of the hidden neurons (IST, Yuan et al. 2019).

The layers from the first one with hidden neurons on are a role of their own, which evaluation divides over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.ir.graph import info
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.subnets.neurons import Dealing, dealing_of
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.pin_checks import PinWords
from splitc.passes.planner.price_plan import price_plan
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Count, Flag, Strategy
from splitc.runtime.spec import Rounds


@dataclass(frozen=True)
class IndependentSubnets(Strategy):
    """Each rank trains its own random part of the hidden neurons, dealt again after each round (IST, Yuan et al. 2019).

    local_steps: updates in a round (J).  insert_norm: normalise hidden layers that have no normalisation, and the
    last layer's outputs.
    """

    name = "independent_subnets"
    exact = False
    compared = False
    pins = PinWords(syncs=("average", "none"))
    local_steps: Count = 8
    insert_norm: Flag | None = None

    @property
    def inserts_norm(self) -> bool:
        return bool(self.insert_norm)

    def searches(self, by_name: bool) -> Sequence[bool]:
        return ()

    def proposals(self, request: Request) -> list[PricedPlan]:
        """The plan that deals all hidden neurons."""
        program, world, dealing = request.program, request.world, dealing_of(request.program, request.world)
        bounds, rules = request.bounds(world), cut_rules(program)
        inside = following(rules, dealing.splits)
        why = self.impossible(request) + unfit(dealing, world)
        why += [rules.reader_only[layer] for layer in inside & set(rules.reader_only)] if world > 1 else []
        if bounds[-1] < world:
            why.append(f"{bounds[-1]} examples cannot be shared out to {world} ranks")
        if why:
            return [infeasible(self.name, why, exact=False)]
        names = request.role_names(min(world, 2))
        role_of = {layer.name: names[-1 if layer.name in inside else 0] for layer in program.layers}
        plan = Plan(
            self.name,
            world,
            dict.fromkeys(names, tuple(range(world))),
            {layer: _placement(request, role, layer) for layer, role in role_of.items()},
            dict.fromkeys(names, bounds),
            all_reduce=request.all_reduce,
            exact=False,
            rounds=Rounds(self.local_steps),
            insert_norm=self.inserts_norm,
        )
        return [price_plan(request, plan)]


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


def _placement(request: Request, role: str, layer: str) -> LayerPlacement:
    split = dealing_of(request.program, request.world).splits.get(layer)
    sync = "average" if request.gradient_of(layer) and request.world > 1 else "none"
    return LayerPlacement(role, "replicated" if split is None else "subnet", sync, split=split)
