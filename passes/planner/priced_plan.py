"""A plan with its prices, and the choice among several by the simulation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from splitc import units
from splitc.cost_models.simulation.alike import num_transfers
from splitc.cost_models.simulation.timeline import SAMPLES, simulate, varies
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.prediction import Candidate
from splitc.ir.roles import ranks_text
from splitc.passes.planner.request import Request
from splitc.passes.planner.search import Found
from splitc.passes.planner.whole_batch import with_whole_batch
from splitc.passes.rewriting import lower_unchecked

EQUAL = 0.05
"""Part of a rate by which simulated ones err: the median error of calibrated clusters."""


@dataclass(frozen=True)
class PricedPlan:
    """The best plan of a strategy and the seconds of its step, or why the strategy has none.

    plan: may be there although it is infeasible, for want of memory.  seconds: simulated, the mean; p90: what nine of
    ten steps take at most, 0 where nothing varies.  program_seconds: by the
    integer program, or a closed form.  bound: samples per second by that price which no plan of the strategy exceeds,
    proved or not.  closed: a closed form is its price, also where others are simulated.  found: the numbers and the
    assignment of the integer program that the plan is from.
    """

    strategy: str
    plan: Plan | None = None
    seconds: float = 0.0
    program_seconds: float = 0.0
    bound: float = 0.0
    proved: bool = True
    infeasible_because: str = ""
    exact: bool = True
    found: Found | None = None
    closed: bool = False
    p90: float = 0.0

    @property
    def feasible(self) -> bool:
        return not self.infeasible_because

    @property
    def global_batch(self) -> int:
        return 0 if self.plan is None else self.plan.global_batch

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.seconds if self.seconds else 0.0

    @property
    def promise(self) -> float:
        """Samples per second, simulated or not yet; 0 where it is infeasible."""
        return self.samples_per_second if self.feasible else 0.0

    @property
    def gap(self) -> float:
        """How much faster another plan could be at most by the program's price, as a fraction of the bound."""
        rate = self.global_batch / self.program_seconds if self.program_seconds else 0.0
        return max(0.0, 1 - rate / self.bound) if self.bound else 0.0

    def candidate(self) -> Candidate:
        """What users see of it."""
        is_exact = self.exact and (self.plan is None or self.plan.wire.is_exact)
        priced = self.strategy, self.seconds, self.samples_per_second, self.global_batch, is_exact
        roles, microbatches = ({}, 1) if self.plan is None else (self.plan.all_roles, self.plan.microbatches)
        return Candidate(*priced, self.feasible, self.infeasible_because, roles, self.program_seconds, microbatches)


def infeasible(strategy: str, problems: Iterable[str], exact: bool = True) -> PricedPlan:
    """The strategy without a plan."""
    return PricedPlan(strategy, infeasible_because="; ".join(problems), exact=exact)


def idle(strategy: str, examples: int, ranks: int, exact: bool = True) -> PricedPlan:
    """No plan, since there are fewer examples than ranks."""
    return infeasible(strategy, [f"{examples} examples leave some of {ranks} ranks without any"], exact)


def priced_plan(request: Request, plan: Plan, problems: Sequence[str]) -> PricedPlan:
    """The one plan of its strategy, whose own rate is the bound."""
    priced = simulated(
        request, PricedPlan(plan.strategy, plan, infeasible_because="; ".join(problems), exact=plan.exact)
    )
    return replace(priced, program_seconds=priced.seconds, bound=priced.promise)


def simulated(request: Request, priced: PricedPlan, most: float = math.inf, samples: int = 0) -> PricedPlan:
    """The plan with its simulated price; infeasible where it cannot be written or has over `most` transfers.

    A plan that is too large for that keeps the price of its closed form.  samples: where steps vary.
    Where lines differ it sums in unequal shares, if that is faster by more than prices err.
    """
    if priced.plan is None or not priced.feasible or priced.closed:
        return priced
    try:
        plan = replace(with_whole_batch(request.program, priced.plan), accumulate=request.accumulate, wire=request.wire)
        plan = replace(plan, sum_shares=())
        seconds, p90 = _step(request, plan, most, samples)
        if request.sum_shares and plan.all_reduce == "backend":
            shared = replace(plan, sum_shares=request.sum_shares)
            if (found := _step(request, shared, most, samples))[0] < (1 - EQUAL) * seconds:
                plan, (seconds, p90) = shared, found
    except PlacementError as error:
        return replace(priced, infeasible_because=str(error), bound=0.0)
    return replace(priced, plan=plan, seconds=seconds, p90=p90)


def _step(request: Request, plan: Plan, most: float, samples: int) -> tuple[float, float]:
    """The simulated step of a plan, and what nine of ten take at most (s)."""
    decision = replace(plan, strategy="").hash, samples
    if decision not in request.simulated:
        program = lower_unchecked(request.program.placed(plan))
        if most < math.inf and (number := num_transfers(program, request.cluster)) > most:
            raise PlacementError(f"its step has {number:,} transfers, too many to be simulated beside faster plans")
        found = simulate(program, request.cluster, samples=samples)
        request.simulated[decision] = found.step_seconds, found.p90
    return request.simulated[decision]


def expected(request: Request, several: Sequence[Sequence[PricedPlan]]) -> list[list[PricedPlan]]:
    """The plans with the expectation of their step, where steps vary and they may be taken.

    Waiting makes no step shorter: plans are simulated anew, the best first, until none is near that was not.
    """
    found = [list(few) for few in several]
    varying = varies(request.cluster, request.world, len(request.program.layers))
    while varying and time.monotonic() < request.deadline:
        near = (1 - EQUAL) * max((each.promise for few in found for each in few if each.exact), default=0.0)
        left = [(few, k) for few in found for k, each in enumerate(few) if not (each.p90 or each.closed)]
        left = [(few, k) for few, k in left if 0 < few[k].promise >= near]
        if not left:
            break
        few, k = max(left, key=lambda one: one[0][one[1]].promise)
        few[k] = simulated(request, few[k], samples=SAMPLES)
    return found


def fastest(priced: Sequence[PricedPlan]) -> PricedPlan:
    """The one with the highest simulated rate; the first of equals.

    Where steps vary, rates that are `EQUAL` are not told apart, and the plan is taken that is the fastest in its slow
    steps: in which fewer ranks wait for each other.
    """
    best = max(priced, key=lambda each: (each.feasible, each.samples_per_second))
    near = [each for each in priced if each.promise >= (1 - EQUAL) * best.promise and each.p90]
    return max(near, key=lambda each: each.global_batch / each.p90) if best.feasible and best.p90 else best


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
    together = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"each rank of {named} ({f'ranks {ranks[0]} to {ranks[-1]}' if together else ranks_text(ranks)})"
