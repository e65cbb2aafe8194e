"""A plan with its price, and the checks of memory that all strategies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitc import units
from splitc.ir.plan import SERVER, Plan
from splitc.ir.prediction import Candidate
from splitc.passes.planner.separation import Separation


@dataclass(frozen=True)
class PricedPlan:
    """The best plan of a strategy and the seconds of its step, or why the strategy has none.

    plan: may be there although it is infeasible, for want of memory.  bound: samples per second that no plan of the
    strategy exceeds, proved or not.  separation: the numbers of the integer program that chose the plan.
    """

    strategy: str
    plan: Plan | None = None
    seconds: float = 0.0
    bound: float = 0.0
    proved: bool = True
    infeasible_because: str = ""
    exact: bool = True
    separation: Separation | None = None

    @property
    def feasible(self) -> bool:
        return not self.infeasible_because

    @property
    def global_batch(self) -> int:
        return 0 if self.plan is None else self.plan.global_batch

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.seconds if self.seconds else 0.0

    def candidate(self) -> Candidate:
        """What users see of it."""
        roles = {} if self.plan is None else dict(self.plan.roles)
        if self.plan is not None and self.plan.servers:
            roles[SERVER] = self.plan.servers
        return Candidate(
            self.strategy,
            self.seconds,
            self.samples_per_second,
            self.global_batch,
            self.exact,
            self.feasible,
            self.infeasible_because,
            roles,
        )


def infeasible(strategy: str, problems: Iterable[str], exact: bool = True) -> PricedPlan:
    """The strategy without a plan."""
    return PricedPlan(strategy, infeasible_because="; ".join(problems), exact=exact)


def idle(strategy: str, examples: int, ranks: int) -> PricedPlan:
    """No plan, since there are fewer examples than ranks."""
    return infeasible(strategy, [f"{examples} examples leave some of {ranks} ranks without any"])


def only_plan(plan: Plan, seconds: float, problems: Sequence[str]) -> PricedPlan:
    """The one plan of its strategy: nothing had to be searched, so its own rate is the bound."""
    bound = 0.0 if problems or not seconds else plan.global_batch / seconds
    return PricedPlan(plan.strategy, plan, seconds, bound, infeasible_because="; ".join(problems), exact=plan.exact)


def shortage(
    roles: Sequence[str], ranks: tuple[int, ...], need: float, have: float, layers: Mapping[str, float]
) -> list[str]:
    """Return a line if each of `ranks`, which are in all of `roles`, needs more bytes of memory than it has.

    layers: bytes that each layer needs there.
    """
    if need <= have * (1 + 1e-9):
        return []
    largest_layer = max(layers, key=lambda layer: layers[layer])
    return [
        f"{_ranks_text(roles, ranks)} needs {units.nbytes(need)} of memory and has {units.nbytes(have)}; "
        f"its largest layer, {largest_layer}, needs {units.nbytes(layers[largest_layer])}"
    ]


def _ranks_text(roles: Sequence[str], ranks: tuple[int, ...]) -> str:
    """`role fc (rank 3)`, `each rank of role conv (ranks 0 to 2)`, `each rank of roles conv and fc (ranks 0 to 3)`."""
    named = f"role {roles[0]}" if len(roles) == 1 else f"roles {', '.join(roles[:-1])} and {roles[-1]}"
    if len(ranks) == 1:
        return f"{named} (rank {ranks[0]})"
    return f"each rank of {named} (ranks {ranks[0]} to {ranks[-1]})"
