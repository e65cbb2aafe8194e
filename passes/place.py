"""Choose where every layer runs: the roles, the ranks in them, and each rank's examples.

This pass only decides: it prices the best plan of every strategy and fills `program.plan`.

    single_device      T = compute(global batch)                                         one rank
    data_parallel      T = compute(largest share) + ring(all gradients)                  all ranks
    layer_separation   T = conv compute + fc compute + exchange + max(ring, ring)        conv, fc
    hybrid_single      the same, with the fc rank among the conv ranks                   conv, fc
    parameter_server   T = compute(largest share) + 2 n_w P / (n_s B)                    worker
    late_multiply, modulo_shard, mixed      what their program computes and puts on the wire (`wire_price`)

    maximise  global batch / T     over the strategies, and the n_c + n_f = world of a separation

compute is the roofline of `cost_models/compute/roofline.py`, ring and exchange are `alpha_beta`;
the layers of a separation come from an integer program whose equations are in `separation_ilp`
(Stanza, Wu et al. 2018, equations 2 to 5, layer by layer).  `program.batch` is one reader's batch:
without `global_batch` more readers make a larger one, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from splitc.checks.graph import every_layer_placed, has_costs
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.profiling.measured import is_measured, require_this_machine
from splitc.errors import PlacementError, bullets
from splitc.ir.cluster import Cluster
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import SERVER, LayerPlacement, Placement, Plan
from splitc.ir.prediction import Candidate, Prediction
from splitc.ir.program import PlacedProgram, Program
from splitc.ir.strategies import (
    Auto,
    DataParallel,
    HybridSingle,
    LateMultiply,
    LayerSeparation,
    ModuloShard,
    ParameterServer,
    SingleDevice,
    Strategy,
    parse_strategy,
)
from splitc.passes.planner.late_family import late_multiply
from splitc.passes.planner.mixed_family import mixed
from splitc.passes.planner.modulo_family import modulo_shard
from splitc.passes.planner.parameter_server import parameter_server
from splitc.passes.planner.pins import MIXED, resolve_pins
from splitc.passes.planner.pricing import Pricing
from splitc.passes.planner.reasons import reasons
from splitc.passes.planner.request import Offer, Request, data_parallel, single_device, unsummed
from splitc.passes.planner.separate_layers import hybrid_single, layer_separation
from splitc.passes.planner.wire_price import layer_seconds

_EXACT = 1e-9  # a smaller gap is none


@dataclass(frozen=True)
class Place(Pass[Program, PlacedProgram]):
    """Fill the plan with the fastest plan of `strategy` that fits, in samples per second.

    pins: pattern of layer names -> role or Placement.  global_batch: examples of a step, shared out
    to the readers; None: `program.batch` for each.  memory: bytes of a rank, in place of the
    device's.  optimizer_copies: of the parameters, in the optimizer's state.  time_limit: seconds
    that the search may take.  model: the fingerprint that goes into the plan.  compare: price the other strategies
    too; without it the plan has no candidates but its own.

    Raises PlacementError when no plan meets what was asked for, and CostError for layers that were measured here and a
    cluster of other devices.
    """

    name: ClassVar[str] = "place"
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
    compare: bool = True

    @classmethod
    def for_settings(
        cls,
        cluster: str | Path | Cluster | None,
        world: int,
        strategy: str | Strategy | type[Strategy],
        pins: Mapping[str, str | Placement],
        global_batch: int | None,
        memory: float | None,
    ) -> Place:
        """The pass for what a user wrote: names of a cluster and of a strategy are looked up.

        Raises CostError and PlacementError for unknown ones.
        """
        return cls(load_cluster(cluster), world, parse_strategy(strategy), pins, global_batch, memory)

    def run(self, program: Program) -> PlacedProgram:
        request = self._request(program)
        asked = self.strategy
        pricing = Pricing(request)
        servers = asked if isinstance(asked, ParameterServer) else ParameterServer()
        groups = asked if isinstance(asked, ModuloShard) else ModuloShard()
        makers: dict[str, Callable[[], Offer]] = {
            SingleDevice.name: lambda: single_device(request),
            DataParallel.name: lambda: data_parallel(request),
            ParameterServer.name: lambda: _all_summed(request, parameter_server(request, servers)),
            LayerSeparation.name: lambda: layer_separation(
                request, asked if isinstance(asked, LayerSeparation) else LayerSeparation()
            ),
            HybridSingle.name: lambda: hybrid_single(request),
            ModuloShard.name: lambda: modulo_shard(pricing, groups, by_name=groups is asked),
            LateMultiply.name: lambda: late_multiply(
                pricing, asked if isinstance(asked, LateMultiply) else LateMultiply()
            ),
            MIXED: lambda: mixed(pricing),
        }
        everything = self.compare or isinstance(asked, Auto)
        offers = tuple(make() for name, make in makers.items() if everything or name == asked.name)
        chosen, most = self._choose(offers)
        gap = max(0.0, 1 - chosen.samples_per_second / most) if most else 0.0
        proof = "heuristic" if not chosen.searched else "optimal" if gap <= _EXACT else "gap"
        plan = Plan(
            strategy=chosen.strategy,
            world=self.world,
            roles=chosen.roles,
            placements={layer: self._placement(request, chosen, layer) for layer in chosen.role_of},
            batch_offsets=chosen.examples,
            model=self.model,
            groups=chosen.groups,
            servers=chosen.servers,
            overlap=chosen.overlap,
            exact=chosen.exact,
            all_reduce=request.all_reduce,
            synchronised=bool(self.strategy.sync_batchnorm),
        )
        prediction = Prediction(
            cluster=self.cluster.name,
            proof=proof,
            gap=gap if gap > _EXACT else 0.0,
            step_seconds=chosen.step_seconds,
            candidates=tuple(_candidate(offer) for offer in offers if offer.strategy != MIXED or offer.feasible),
            reasons=reasons(request, chosen),
            layer_seconds=self._seconds(request, plan),
        )
        return program.placed(replace(plan, prediction=prediction))

    def _seconds(self, request: Request, plan: Plan) -> dict[str, float]:
        """Compute of every layer on the busiest rank of its role."""
        return {layer: layer_seconds(request, plan, layer) for layer in plan.placements}

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
        if self.cluster.world is not None and self.world > self.cluster.world:
            found.append(
                f"{self.world} ranks were asked for, but cluster {self.cluster.name} has {self.cluster.world} devices"
            )
        return found

    def _request(self, program: Program) -> Request:
        problems = self.problems()
        if problems:
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
        )

    def _choose(self, offers: tuple[Offer, ...]) -> tuple[Offer, float]:
        """The offer to take, and the samples per second that no plan asked for exceeds."""
        if not isinstance(self.strategy, Auto):
            for offer in offers:
                if offer.strategy == self.strategy.name:
                    if not offer.feasible:
                        raise PlacementError(f"{self.strategy} is not possible: {offer.why}")
                    return offer, offer.most
            raise PlacementError(f"strategy {self.strategy} cannot be planned yet")
        feasible = [offer for offer in offers if offer.feasible and offer.exact]
        if not feasible:
            title = f"no strategy has a plan for {self.world} ranks on {self.cluster.name}:"
            lines = [f"{offer.strategy}: {offer.why}" for offer in offers if offer.why]
            raise PlacementError(bullets(title, lines))
        most = max(offer.most for offer in offers)
        return max(feasible, key=lambda offer: offer.samples_per_second), most

    def _placement(self, request: Request, offer: Offer, layer: str) -> LayerPlacement:
        if offer.placements:
            return offer.placements[layer]
        role = offer.role_of[layer]
        trains = any(request.program.tensors[name].trainable for name in request.program.layer(layer).tensors)
        summed = trains and len(offer.roles[role]) > 1
        return LayerPlacement(role, "replicated", "all_reduce" if summed else "none")


def _all_summed(request: Request, offer: Offer) -> Offer:
    """The offer, infeasible where a pin asks that nobody sums what its ranks train."""
    why = unsummed(request, offer.role_of)
    return replace(offer, feasible=False, most=0.0, why="; ".join(filter(None, (offer.why, *why)))) if why else offer


def _candidate(offer: Offer) -> Candidate:
    return Candidate(
        offer.strategy,
        offer.step_seconds,
        offer.samples_per_second,
        offer.global_batch,
        exact=offer.exact,
        feasible=offer.feasible,
        why=offer.why,
        roles={**offer.roles, **({SERVER: offer.servers} if offer.servers else {})},
    )
