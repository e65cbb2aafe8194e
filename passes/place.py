"""Choose where every layer runs: the roles, the ranks in them, and each rank's examples.

This pass only decides: it prices the best plan of the strategy asked for (`auto`: of all) and fills `program.plan`.

    single_device      T = compute(global batch)                                         one rank
    data_parallel      T = compute(largest share) + ring(all gradients)                  all ranks
    layer_separation   T = conv compute + fc compute + exchange + max(ring, ring)        conv, fc
    hybrid_single      the same, with the fc rank among the conv ranks                   conv, fc
    parameter_server   T = compute(largest share) + 2 n_w P / (n_s B)                    worker
    late_multiply, modulo_shard, mixed      what their program computes and puts on the wire (`wire_price`)
    local_sgd        T = compute(largest share) + ring(all parameters) / period          all ranks

    maximise  global batch / T     over the strategies, and the n_c + n_f = world of a separation

compute is the roofline of `cost_models/compute/roofline.py`, ring and exchange are `alpha_beta`;
the layers of a separation come from an integer program whose equations are in `separation_ilp`
(Stanza, Wu et al. 2018, equations 2 to 5, layer by layer).  `program.batch` is one reader's batch:
without `global_batch` more readers make a larger one, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from splitc.checks.batch_sizes import microbatch_problems
from splitc.checks.graph import every_layer_placed, has_costs
from splitc.cost_models.compute.cost_cache import graph_text
from splitc.cost_models.profiling.measured import is_measured, require_this_machine
from splitc.errors import PlacementError, bullets
from splitc.ir.cluster import Cluster
from splitc.ir.disk_cache import digest_of, is_off, keep, recall
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.prediction import Candidate, Prediction
from splitc.ir.program import PlacedProgram, Program
from splitc.ir.strategies import (
    Auto,
    DataParallel,
    HybridSingle,
    IndependentSubnets,
    LateMultiply,
    LayerSeparation,
    LocalSGD,
    ModuloShard,
    ParameterServer,
    SingleDevice,
)
from splitc.ir.strategy import Strategy
from splitc.passes.planner.pin_checks import MIXED
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.priced_plan import PricedPlan
from splitc.passes.planner.propose_late_multiply import late_multiply
from splitc.passes.planner.propose_mixed import mixed
from splitc.passes.planner.propose_modulo_shard import modulo_shard
from splitc.passes.planner.propose_parameter_server import parameter_server
from splitc.passes.planner.propose_replicated import data_parallel, single_device
from splitc.passes.planner.propose_rounds import local_sgd
from splitc.passes.planner.propose_separation import hybrid_single, layer_separation
from splitc.passes.planner.propose_subnets import independent_subnets
from splitc.passes.planner.reasons import explain
from splitc.passes.planner.request import Request
from splitc.passes.planner.whole_batch import with_whole_batch
from splitc.passes.planner.wire_price import layer_seconds

_NOT_READ = ("graph", "root", "evaluation")  # of a program; the text of its graph is
_EXACT = 1e-9  # a smaller gap is none


@dataclass(frozen=True)
class Place(Pass[Program, PlacedProgram]):
    """Fill the plan with the fastest plan of `strategy` that fits, in samples per second.

    pins: pattern of layer names -> role or Placement.  global_batch: examples of a step, shared out
    to the readers; None: `program.batch` for each.  memory: bytes of a rank, in place of the
    device's.  optimizer_copies: of the parameters, in the optimizer's state.  time_limit: seconds
    that the search may take.  model: the fingerprint that goes into the plan.

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

    def run(self, program: Program) -> PlacedProgram:
        request, key = self._request(program), self._key(program)
        kept = None if key is None else recall("plan", key)
        plan = self._plan(request) if kept is None else Plan.from_json(kept)
        if key is not None and kept is None and plan.prediction.proof != "gap":  # more time might find a better one
            keep("plan", key, plan.to_json())
        compared = None if isinstance(self.strategy, Auto) else lambda: _candidates(self._priced(request, True))
        return program.placed(replace(plan, prediction=replace(plan.prediction, all=compared)))

    def _key(self, program: Program) -> str | None:
        """A digest of what the plan follows from; None if a text does not tell all of it."""
        graph = None if is_off() else graph_text(program)
        if graph is None:
            return None
        known = [getattr(program, each.name) for each in fields(Program) if each.name not in _NOT_READ]
        return digest_of(graph, repr(known), repr(self))

    def _plan(self, request: Request) -> Plan:
        """The plan to take, with its prices."""
        priced = self._priced(request, isinstance(self.strategy, Auto))
        chosen, bound = self._choose(priced)
        assert chosen.plan is not None, "a feasible strategy has a plan"
        gap = max(0.0, 1 - chosen.samples_per_second / bound) if bound else 0.0
        plan = replace(chosen.plan, model=self.model, synchronised=bool(self.strategy.sync_batchnorm))
        plan = self._in_microbatches(request.program, plan)
        prediction = Prediction(
            cluster=self.cluster.name,
            proof="heuristic" if not chosen.proved else "optimal" if gap <= _EXACT else "gap",
            gap=gap if gap > _EXACT else 0.0,
            step_seconds=chosen.seconds,
            priced=_candidates(priced),
            reasons=explain(request, chosen),
            layer_seconds={layer: layer_seconds(request, plan, layer) for layer in plan.placements},
        )
        return replace(plan, prediction=prediction)

    def _in_microbatches(self, program: Program, plan: Plan) -> Plan:
        """The plan in the microbatches asked for, in place of those of its groups, unless these were asked for too."""
        asked = self.strategy
        if not asked.microbatches or asked.microbatches == 1:
            return plan
        if not (isinstance(asked, ModuloShard) and asked.scheme):
            plan = replace(plan, groups={role: replace(group, scheme="BK") for role, group in plan.groups.items()})
        plan = replace(plan, microbatches=asked.microbatches, schedule=asked.schedule or plan.schedule)
        if problems := [*decision_problems(plan), *microbatch_problems(program, plan)]:
            raise PlacementError(bullets(f"{asked} is not possible:", problems))
        return plan

    def _priced(self, request: Request, everything: bool) -> tuple[PricedPlan, ...]:
        """The best plan of the strategy asked for, or of every strategy."""
        asked = self.strategy
        servers = asked if isinstance(asked, ParameterServer) else ParameterServer()
        groups = asked if isinstance(asked, ModuloShard) else ModuloShard()
        separation = asked if isinstance(asked, LayerSeparation) else LayerSeparation()
        late = asked if isinstance(asked, LateMultiply) else LateMultiply()
        propose: dict[str, Callable[[], PricedPlan]] = {
            SingleDevice.name: lambda: single_device(request),
            DataParallel.name: lambda: data_parallel(request),
            ParameterServer.name: lambda: parameter_server(request, servers),
            LayerSeparation.name: lambda: layer_separation(request, separation, by_name=separation is asked),
            HybridSingle.name: lambda: hybrid_single(request),
            ModuloShard.name: lambda: modulo_shard(request, groups, by_name=groups is asked),
            LateMultiply.name: lambda: late_multiply(request, late),
            MIXED: lambda: mixed(request),
        }
        if isinstance(asked, LocalSGD):
            propose[asked.name] = lambda: local_sgd(request, asked)
        if isinstance(asked, IndependentSubnets):
            propose[asked.name] = lambda: independent_subnets(request, asked)
        proposed = (each() for name, each in propose.items() if everything or name == asked.name)
        return tuple(with_whole_batch(request, each) for each in proposed)

    def problems(self) -> list[str]:
        """What is wrong with the request whatever the model: one line each."""
        found = []
        for what, value in (("world", self.world), ("global_batch", self.global_batch)):
            if value is not None and (type(value) is not int or value < 1):
                found.append(f"{what} is {value!r}; it must be a whole number of at least 1")
        if self.memory is not None and not self.memory > 0:
            found.append(f"memory is {self.memory!r}; it must be more than 0 bytes")
        if self.optimizer_copies < 0:
            found.append(f"optimizer_copies is {self.optimizer_copies}; it must be at least 0")
        most = self.cluster.world
        if most is not None and self.world > most:
            found.append(f"{self.world} ranks were asked for, but cluster {self.cluster.name} has {most} devices")
        return found

    def _request(self, program: Program) -> Request:
        if problems := self.problems():
            raise PlacementError(bullets("this cannot be planned:", problems))
        if is_measured(program):
            require_this_machine(self.cluster)
        pins = resolve_pins(self.pins, [layer.name for layer in program.layers])
        return Request(
            program,
            self.cluster,
            self.world,
            pins,
            self.global_batch,
            self.memory,
            self.optimizer_copies,
            self.time_limit,
            self.strategy.all_reduce or "backend",
            self.strategy.microbatches or 1,
            self.strategy.schedule or "all_forward",
        )

    def _choose(self, priced: tuple[PricedPlan, ...]) -> tuple[PricedPlan, float]:
        """The plan to take, and the samples per second that no plan of the strategies in question exceeds."""
        if not isinstance(self.strategy, Auto):
            (chosen,) = (each for each in priced if each.strategy == self.strategy.name)
            if not chosen.feasible:
                raise PlacementError(f"{self.strategy} is not possible: {chosen.infeasible_because}")
            return chosen, chosen.bound
        feasible = [each for each in priced if each.feasible and each.exact]
        if not feasible:
            why = [f"{each.strategy}: {each.infeasible_because}" for each in priced if each.infeasible_because]
            raise PlacementError(bullets(f"no strategy has a plan for {self.world} ranks on {self.cluster.name}:", why))
        return max(feasible, key=lambda each: each.samples_per_second), max(each.bound for each in priced)


def _candidates(priced: tuple[PricedPlan, ...]) -> tuple[Candidate, ...]:
    """What users see of the plans; the mixed one only where there is one."""
    return tuple(each.candidate() for each in priced if each.strategy != MIXED or each.feasible)
