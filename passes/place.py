"""Choose where every layer runs: the roles, the ranks in them, and each rank's examples.

This pass only decides: it proposes the best plan of the strategy asked for (`auto`: of all, and of the whole space that
they are parts of) and fills `program.plan`.  An integer program (`planner/integer_program.py`) finds the best few plans
of a strategy, and the simulation, which knows what overlaps, decides among them and among strategies.
`program.batch` is one reader's batch: without `global_batch` more readers make a larger one, as in Stanza.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Annotated, Any, ClassVar

from splitc.checks.graph import every_layer_placed, has_costs
from splitc.cost_models.compute.cost_cache import graph_text
from splitc.errors import PlacementError, bullets
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import digest
from splitc.ir.decode import Count, at_least, decode, more_than
from splitc.ir.disk_cache import digest_of, is_off, keep, recall
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.placements import Placement
from splitc.ir.plan import MOST_RANKS, Plan
from splitc.ir.prediction import Candidate, Prediction
from splitc.ir.program import PlacedProgram, Program
from splitc.passes.bucket_gradients import bucket_bytes
from splitc.passes.planner.divisions import FEW
from splitc.passes.planner.layer_seconds import layer_seconds
from splitc.passes.planner.order import AT_ONCE
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.priced_plan import PricedPlan, expected, fastest, simulated
from splitc.passes.planner.propose import propose
from splitc.passes.planner.reasons import explain
from splitc.passes.planner.registry import STRATEGIES
from splitc.passes.planner.request import Request
from splitc.passes.planner.search import NEAR
from splitc.passes.planner.strategy import Strategy, strategy_named
from splitc.runtime.transport.formats import AS_COMPUTED, EXACT, Wire

_RANKS = Annotated[int, at_least(1, MOST_RANKS)]
_LIMITS = {
    "world": _RANKS,
    "global_batch": Count | None,
    "accumulate": Count,
    "memory": Annotated[float, more_than(0)] | None,
}
_NOT_READ = ("graph", "root", "evaluation", "outputs")  # of a program; the text of its graph is
_EXACT = 1e-6  # a smaller gap is none
_EQUAL = 0.03  # of a step, for which no batches are accumulated
_MANY = 256  # layers, from which simulating takes seconds
_PIECES = (2, 4)  # numbers of microbatches, beside one, that finalists have
_REACH = 0.2  # of the best rate, below which a plan is no finalist, though prices are of another machine
_TRANSFERS = 50_000  # of a step that is simulated where other plans are known, in a world of more than a few ranks


@dataclass(frozen=True)
class Place(Pass[Program, PlacedProgram]):
    """Fill the plan with the fastest plan of `strategy` that fits, in samples per second.

    pins: pattern of layer names -> role or Placement.  global_batch: examples of a step, shared out
    to the readers; None: `program.batch` for each.  memory: bytes of a rank, in place of the
    device's.  optimizer_copies: of the parameters, in the optimizer's state.  time_limit: seconds
    that the search may take.  model: the fingerprint that goes into the plan.  accumulate: batches to an update
    that are allowed.  wire: the formats in which numbers travel.  fewer_readers: `auto` may give few readers, or one
    rank, the examples that as many readers as there can be would bring, where that is faster.  fits: whether the ranks
    of a plan have enough memory, to the byte; plans that do not are passed over while their strategy has another one.

    Raises PlacementError when no plan meets what was asked for, and CostError for layers that were measured here and a
    cluster of other devices.
    """

    requires: ClassVar[tuple[Check, ...]] = (has_costs,)
    ensures: ClassVar[tuple[Check, ...]] = (every_layer_placed,)

    cluster: Cluster
    world: int
    strategy: Strategy
    pins: Mapping[str, str | Placement] = field(default_factory=dict)
    global_batch: int | None = None
    memory: float | None = None
    optimizer_copies: int = 1
    time_limit: float = 60.0
    model: str = ""
    accumulate: int = 1
    wire: Wire = AS_COMPUTED
    fewer_readers: bool = False
    fits: Callable[[Program, Plan], bool] | None = field(default=None, compare=False, repr=False)

    def run(self, program: Program) -> PlacedProgram:
        request, key = self._request(program), self._key(program)
        kept, begin = None if key is None else recall("plan", key), time.monotonic()
        plan = self._plan(request) if kept is None else Plan.from_json(kept)
        stopped = time.monotonic() - begin >= self.time_limit  # more time might find a better one
        if key is not None and kept is None and not stopped:
            keep("plan", key, plan.to_json())
        compared = None if self.strategy.compares else lambda: _candidates(self._priced(replace(request), True))
        return program.placed(replace(plan, prediction=replace(plan.prediction, all=compared)))

    def simulated(self, program: Program) -> list[PricedPlan]:
        """The plans that `auto` compares."""
        several = self.compared(self._request(program), everything=True)
        return [each for few in several for each in few if each.feasible]

    def finalists(self, program: Program, number: int) -> list[Plan]:
        """At most `number` different plans that may be the fastest, to be measured: the one to take unmeasured first.

        The best of each strategy, then of its other divisions and microbatches, of those that are within reach.
        """
        asked = [self]
        if self.strategy.compares and self.strategy.microbatches is None:
            asked += [replace(self, strategy=replace(self.strategy, microbatches=pieces)) for pieces in _PIECES]
        found: dict[tuple[object, ...], tuple[float, Plan]] = {}
        for place in asked:
            request = place._request(program)
            several = place.compared(request, self.strategy.compares)
            priced = tuple(map(fastest, several))
            for each in chain(*several):
                is_asked = each.exact or not self.strategy.compares
                if each.plan is not None and each.feasible and is_asked and not _in_vain(each.plan):
                    plan = place._predicted(request, _with_fewest_batches(request, each), priced)
                    kept, rate = found.get(kind := _kind(plan)), each.samples_per_second
                    if kept is None or rate > kept[0]:
                        found[kind] = rate, plan
        first = self.run(program).plan
        ranked = sorted(found.items(), key=lambda each: -each[1][0])
        turns, order = Counter([first.strategy]), list[tuple[int, int, Plan]]()
        for k, (kind, (rate, plan)) in enumerate(ranked):
            if kind != _kind(first) and rate >= _REACH * ranked[0][1][0]:
                order.append((turns[plan.strategy], k, plan))
                turns[plan.strategy] += 1
        return [first, *(plan for *_, plan in sorted(order, key=lambda each: each[:2]))][:number]

    def _key(self, program: Program) -> str | None:
        """A digest of what the plan follows from; None if a text does not tell all of it."""
        graph = None if is_off() else graph_text(program)
        if graph is None:
            return None
        known = [getattr(program, each.name) for each in fields(Program) if each.name not in _NOT_READ]
        return digest_of(graph, repr(known), repr(self))

    def _plan(self, request: Request) -> Plan:
        """The plan to take, with its prices."""
        several = self.compared(request, self.strategy.compares)
        priced = tuple(map(fastest, several))
        chosen = self._choose(priced)
        while self.fits is not None and not (
            chosen.plan is None or self.fits(request.program, self._whole(chosen.plan))
        ):
            left = [rest for few in several if (rest := [each for each in few if each is not chosen])]
            if not any(each.feasible and each.exact >= chosen.exact for few in left for each in few):
                break  # none is left: what is short is told when the plan is compiled
            several, priced = left, tuple(map(fastest, left))
            chosen = self._choose(priced)
        return self._predicted(request, _with_fewest_batches(request, chosen), priced)

    def _predicted(self, request: Request, chosen: PricedPlan, priced: tuple[PricedPlan, ...]) -> Plan:
        """The whole plan with its prices.  priced: the best of each strategy."""
        assert chosen.plan is not None, "a feasible strategy has a plan"
        plan = self._whole(chosen.plan)
        gap = replace(chosen, bound=max(each.bound for each in priced)).gap
        proved = chosen.proved and all(each.proved for each in priced if each.feasible)
        prediction = Prediction(
            cluster=self.cluster.name,
            priced_on=digest(self.cluster),
            proof="heuristic" if not proved else "optimal" if gap <= _EXACT else "gap",
            gap=gap if gap > _EXACT else 0.0,
            step_seconds=chosen.seconds,
            program_seconds=chosen.program_seconds,
            priced=_candidates(priced),
            reasons=explain(request, chosen),
            layer_seconds={layer: layer_seconds(request, plan, layer) for layer in plan.placements},
        )
        return replace(plan, prediction=prediction)

    def _whole(self, plan: Plan) -> Plan:
        """The plan with what was asked for beside it."""
        synchronised, sums = bool(self.strategy.sync_batchnorm), {place.sync for place in plan.placements.values()}
        nbytes = bucket_bytes(self.cluster.link_over(range(plan.world))) if "all_reduce" in sums else None
        return replace(plan, model=self.model, synchronised=synchronised, bucket_bytes=nbytes, wire=self.wire)

    def _priced(self, request: Request, everything: bool) -> tuple[PricedPlan, ...]:
        """The best plan of the strategy asked for, or of every strategy, by the simulation."""
        return tuple(map(fastest, self.compared(request, everything)))

    def compared(self, request: Request, everything: bool) -> list[list[PricedPlan]]:
        """The best few plans of these strategies, simulated where they may be the best."""
        own = self.strategy
        names = [name for name in STRATEGIES if everything and strategy_named(name).compared]
        names += [own.name] if not (own.compares or own.name in names) else []
        proposed = [self._proposed(request, name) for name in names]
        few = not everything or request.world <= FEW
        best, priced = _compared(request, proposed, math.inf if few else _TRANSFERS)
        if not (best or few):
            _, priced = _compared(request, proposed, math.inf)
        if self.fewer_readers and own.compares and self.global_batch is None:
            priced = self._with_fewer_readers(request, priced)
        order = {name: k for k, name in enumerate(names)}
        return sorted(expected(request, priced), key=lambda few: order[few[0].strategy])

    def _proposed(self, request: Request, name: str) -> list[PricedPlan]:
        """The best few plans of a strategy, before they are simulated."""
        asked, kind = self.strategy, strategy_named(name)
        common = {f.name: getattr(asked, f.name) for f in fields(Strategy) if getattr(asked, f.name) is not None}
        own = asked if isinstance(asked, kind) else kind(**common)
        searched = [propose(request, own, by_name) for by_name in own.searches(own is asked)]
        return [*own.proposals(request), *chain.from_iterable(searched)]

    def _with_fewer_readers(self, request: Request, priced: list[list[PricedPlan]]) -> list[list[PricedPlan]]:
        """The plans, and before them those that train the examples of the fastest in less time.

        Of one rank also such as take no longer for them.
        """
        best = fastest([each for few in priced for each in few if each.exact])
        if not best.feasible or best.global_batch == request.program.batch:
            return priced
        same, found = replace(request, global_batch=best.global_batch), list[list[PricedPlan]]()
        for few in priced:
            kind = strategy_named(few[0].strategy)
            others = self._proposed(same, kind.name) if few[0].exact else []
            better = operator.ge if kind.is_alone else operator.gt
            tried = (simulated(same, each) for each in others)
            found.append([*(each for each in tried if better(each.promise, best.promise)), *few])
        return found

    def problems(self) -> list[str]:
        """What is wrong with the request whatever the model: one line each."""
        if found := values_refused(self):
            return found
        most = self.cluster.world
        if most is not None and self.world > most:
            found.append(
                f"{self.world} ranks were asked for, but cluster {self.cluster.name} has {most} devices; take {most}"
            )
        if self.wire.gradients != EXACT and (self.strategy.all_reduce or "backend") != "backend":
            why = f"wire: a sum of {self.wire.gradients} gradients is not made by {self.strategy.all_reduce}"
            found.append(f"{why}; leave out all_reduce, or the format of gradients")
        if self.accumulate != 1 and getattr(self.strategy, "updates", None) == "every":
            found.append(f"accumulate is {self.accumulate!r}, but {self.strategy} updates in every microbatch; take 1")
        return found

    def _request(self, program: Program) -> Request:
        if problems := self.problems():
            raise PlacementError(bullets("this cannot be planned:", problems))
        pins = resolve_pins(self.pins, [layer.name for layer in program.layers])
        asked = program, self.cluster, self.world, pins, self.global_batch, self.memory
        how = self.strategy.all_reduce or "backend", self.strategy.order(AT_ONCE), self.accumulate, self.wire
        return Request(*asked, self.optimizer_copies, self.time_limit, *how)

    def _choose(self, priced: tuple[PricedPlan, ...]) -> PricedPlan:
        """The plan to take."""
        if not self.strategy.compares:
            (chosen,) = (each for each in priced if each.strategy == self.strategy.name)
            if not chosen.feasible:
                raise PlacementError(f"{self.strategy} is not possible: {chosen.infeasible_because}")
            return chosen
        feasible = [each for each in priced if each.feasible and each.exact]
        if not feasible:
            why = [f"{each.strategy}: {each.infeasible_because}" for each in priced if each.infeasible_because]
            raise PlacementError(bullets(f"no strategy has a plan for {self.world} ranks on {self.cluster.name}:", why))
        return fastest(feasible)


def _compared(request: Request, proposed: list[list[PricedPlan]], most: float) -> tuple[float, list[list[PricedPlan]]]:
    """The best rate, and the plans of each strategy that are simulated, of at most so many transfers, or the first."""
    best, found = 0.0, []
    large = request.world > FEW or len(request.program.layers) > _MANY
    for several in sorted(proposed, key=lambda few: max(each.promise for each in few), reverse=True):
        tried: list[PricedPlan] = []
        for each in several:
            if large and tried and each.promise < NEAR * best:
                continue  # which the simulation would not make the best
            if best and each.feasible and time.monotonic() > request.deadline:
                tried.append(replace(each, infeasible_because=f"not simulated in {request.time_limit:g} s"))
                continue
            tried.append(simulated(request, each, most))
            best = max(best, tried[-1].promise if each.exact else 0.0)
        found.append(tried or several[:1])
    return best, found


def _in_vain(plan: Plan) -> bool:
    """Whether it has microbatches although nothing travels."""
    return plan.microbatches > 1 and len({rank for ranks in plan.roles.values() for rank in ranks}) == 1


def _kind(plan: Plan) -> tuple[object, ...]:
    """What plans of one division and one way to sum gradients have in common."""
    roles = tuple((len(ranks), plan.grouping(role).size) for role, ranks in plan.roles.items())
    return roles, plan.microbatches, frozenset((each.holding, each.sync) for each in plan.placements.values())


def _with_fewest_batches(request: Request, chosen: PricedPlan) -> PricedPlan:
    """The plan with the fewest batches to an update, of 1, 2, 4, ... and those allowed, that are as fast."""
    numbers = [2**k for k in range(request.accumulate.bit_length()) if 2**k < request.accumulate]
    tried = (simulated(replace(request, accumulate=number), chosen) for number in numbers)
    return next((each for each in tried if each.seconds <= (1 + _EQUAL) * chosen.seconds), chosen)


def _candidates(priced: tuple[PricedPlan, ...]) -> tuple[Candidate, ...]:
    """What users see of the plans; the mixed one only where it is not another strategy's too."""

    def decided(each: PricedPlan) -> str:
        return replace(each.plan, strategy="").hash if each.plan is not None and each.feasible else ""

    spanning = [name for name in STRATEGIES if strategy_named(name).spans]
    others = {"", *(decided(each) for each in priced if each.strategy not in spanning)}
    return tuple(each.candidate() for each in priced if each.strategy not in spanning or decided(each) not in others)


def values_refused(asked: Any) -> list[str]:
    """What is wrong with the numbers and pins of a request, one by one, in a line each."""
    found = list(map(str, decode(_LIMITS, {what: getattr(asked, what) for what in _LIMITS})[1]))
    pins = asked.pins.items() if isinstance(asked.pins, Mapping) else [(asked.pins, None)]
    wrong = [(key, role) for key, role in pins if not (isinstance(key, str) and isinstance(role, str | Placement))]
    return found + [
        f"pins has {each!r:.60}; write a pattern of layers, and its role or Placement" for each in wrong[:1]
    ]
