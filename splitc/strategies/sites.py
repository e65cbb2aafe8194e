"""An exact plan inside each site, and rounds of local updates between the sites (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from splitc.errors import PlacementError
from splitc.passes.place import Place
from splitc.passes.planner.price_plan import problems_of
from splitc.passes.planner.priced_plan import PricedPlan, infeasible, priced_plan
from splitc.passes.planner.propose import SIMULATED
from splitc.passes.planner.request import Request, largest
from splitc.passes.planner.strategy import Count, parse_strategy
from splitc.strategies.in_rounds import InRounds


@dataclass(frozen=True)
class Sites(InRounds):
    """The fastest exact plan of a site in each of them; after `period` updates the sites average.

    inside: the strategy of a site, with its options.  ranks: of a site, where the cluster has none; else a host is one.
    """

    name = "sites"
    exact = False
    compared = False
    period: Count = 32
    inside: str = "auto"
    ranks: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (inside := parse_strategy(self.inside)).is_exact:
            raise PlacementError(f"{self.name}: {inside} is not exact; ranks of a site train together")

    def unit(self, request: Request) -> int:
        cluster = request.cluster
        return self.ranks or cluster.ranks_per_site or cluster.ranks_per_host or 1

    def searches(self, by_name: bool) -> Sequence[bool]:
        return ()

    def proposals(self, request: Request) -> list[PricedPlan]:
        """The best few plans of the first site, for all of them."""
        unit = self.unit(request)
        if unit >= request.world or request.world % unit:
            no = f"{request.world} ranks are not several sites of {unit}: give ranks=, or ranks_per_site of a cluster"
            return [infeasible(self.name, [no], self.exact)]
        batch = request.global_batch and largest(request.bounds(request.world // unit))
        inside, asked = replace(request, world=unit, global_batch=batch), parse_strategy(self.inside)
        place = Place(request.cluster, unit, replace(asked, sync_batchnorm=self.sync_batchnorm))
        few = list(chain(*place.compared(inside, asked.compares)))
        why = [f"inside a site {each.strategy}: {each.infeasible_because}" for each in few if not each.feasible]
        best = sorted((each for each in few if each.feasible and each.exact), key=lambda each: -each.promise)
        found = [self.repeated(request, each.plan, unit) for each in best if each.plan is not None]
        made = [priced_plan(request, plan, problems_of(request, plan)) for plan in found[: 2 * SIMULATED]]
        return made or [infeasible(self.name, why, self.exact)]
