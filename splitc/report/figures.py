"""Compute the figures of the report, and write them as JSON (`inspect --json`, schema 1).

All figures are for one step, in SI units; a multiply-add counts two FLOPs.  Where ranks train in rounds, bytes are the
mean over the steps of a round.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.memory_check import memory_of_all
from splitc.ir.features import features
from splitc.ir.layers import Layer
from splitc.ir.plan import Plan
from splitc.ir.prediction import Candidate
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp
from splitc.runtime.transport.collective import Collective
from splitc.runtime.transport.formats import BLOCK, FORMATS
from splitc.runtime.transport.phases import Phases

ERROR = 0.1
"""Of a predicted rate (docs/measurements/accuracy.md); plans that differ by less are equal."""

MEMORY = {
    **{"memory": "peak", "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer_state"},
    **{"activation": "activations", "communication": "communication", "buffer": "buffers"},
}
"""Kinds of bytes of a rank, and what they are of its memory."""

_OF_PLAN = ("world", "strategy", "exact", "global_batch", "accumulate", "step_seconds", "samples_per_second")
_PREDICTED = ("cluster", "basis", "proof", "gap", "advice", "program_seconds", "simulated_seconds")
_SLOWEST = 5  # layers of the busiest rank


def as_json(program: LoweredProgram) -> dict[str, Any]:
    """Return the whole report.  A layer's figures are those of its busiest rank."""
    figures = Figures(program)
    return {
        **of_plan(program.plan, program.name),
        "layers": [figures.layer(layer) for layer in program.layers],
        "ranks": [figures.rank(rank) for rank in range(program.plan.world)],
        "busiest": figures.busiest(),
        "latency_share": figures.latency,
        "by_bytes": list(by_bytes(program)),
        "notes": list(program.notes),
    }


def of_plan(plan: Plan, name: str) -> dict[str, Any]:
    """Return what a plan tells without its program: no bytes and FLOPs of layers, no memory.  name: of the model."""
    told = plan.prediction
    return {
        "schema": 1,
        "model": name,
        "plan": plan.hash,
        **{key: getattr(plan, key) for key in _OF_PLAN},
        **{key: getattr(told, key) for key in _PREDICTED},
        "error": ERROR,
        "measured_seconds": told.ran or None,
        **{key: value for feature in features() for key, value in feature.figures(plan).items()},
        **({} if plan.wire.is_exact else {"wire": asdict(plan.wire)}),
        "p50_seconds": told.p50 or told.simulated_seconds,
        "p90_seconds": told.p90 or told.simulated_seconds,
        "roles": {role: list(ranks) for role, ranks in plan.all_roles.items()},
        "layers": [_placed(plan, layer) for layer in plan.placements],
        "ranks": [_predicted(plan, rank) for rank in range(plan.world)],
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
        "tried": [asdict(each) for each in told.tried],
        **({"on_wire": [*map(_candidate, told.on_wire)]} if told.on_wire else {}),
    }


def _placed(plan: Plan, layer: str) -> dict[str, Any]:
    place, told = plan.placements[layer], plan.prediction
    return {
        "name": layer,
        **{key: getattr(place, key) for key in ("role", "holding", "sync", "group")},
        "seconds": told.layer_seconds.get(layer, 0.0),
        "why": told.reasons.get(layer, ""),
    }


def _predicted(plan: Plan, rank: int) -> dict[str, Any]:
    phases = plan.prediction.phases[rank] if plan.prediction.phases else Phases(rank, 0.0, 0.0, 0.0, 0.0, 0.0)
    seconds = {f"{key}_seconds": getattr(phases, key) for key in ("compute", "waiting", "communication")}
    return {"rank": rank, "role": " and ".join(plan.duties(rank)) or None, **seconds, "sent_bytes": phases.sent_bytes}


def by_bytes(program: Program) -> tuple[str, ...]:
    """Return the ops that are priced by the bytes they access alone, since their FLOPs are unknown."""
    costs = (program.costs[layer.name] for layer in program.layers)
    return tuple(dict.fromkeys(name for cost in costs for name in cost.small.unknown_ops))


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return asdict(candidate) | {"roles": {role: len(ranks) for role, ranks in candidate.roles.items()}}


@dataclass(frozen=True)
class Figures:
    """The figures of a program's layers and ranks."""

    program: LoweredProgram

    def layer(self, layer: Layer) -> dict[str, Any]:
        """Return the figures of a layer on its busiest rank."""
        program, plan = self.program, self.program.plan
        place = plan.placements[layer.name]
        cost = program.costs[layer.name].at(plan.largest_batch(place.role))
        held = [program.tensors[h] for h in layer.tensors if program.tensors[h].parameter]
        gradient = sum(h.nbytes for h in held if h.trainable)
        ring = _ring(gradient, plan.world)
        return {
            **_placed(plan, layer.name),
            "source": layer.source,
            "parameters": sum(h.numel for h in held),
            "flops": cost.flops,
            "ccr": cost.flops / ring if ring else None,
            "sent_bytes": int(self._sent(layer, gradient)),
        }

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the memory and traffic of one rank in a step; zeros for a rank without work.

        Each kind of memory is at its own peak, so their sum may exceed `memory_bytes`, the peak of all.
        """
        plan, memory = self.program.plan, self._memory[rank]
        return {
            **_predicted(plan, rank),
            **{f"{kind}_bytes": int(getattr(memory, of)) for kind, of in MEMORY.items()},
            "sent_bytes": int(sum(op.per_step for op in self._wires[rank])),
            "messages": round(sum(op.times for op in self._wires[rank]), 2),
            "received_bytes": int(self._received.get(rank, 0.0)),
        }

    def busiest(self) -> dict[str, Any] | None:
        """Return the rank that computes longest, and the five layers on it that take longest; None without a price.

        imbalance: its seconds of computing over the mean of all ranks.
        """
        plan, phases = self.program.plan, self.program.plan.prediction.phases
        most = max(phases, key=lambda each: each.compute, default=None)
        if most is None or not most.compute:
            return None
        seconds = plan.prediction.layer_seconds
        own = [name for name in seconds if most.rank in plan.roles[plan.placements[name].role]]
        slowest = sorted(own, key=lambda name: -seconds[name])[:_SLOWEST]
        layers = [{"name": name, "seconds": seconds[name]} for name in slowest]
        imbalance = most.compute * len(phases) / sum(each.compute for each in phases)
        return {"rank": most.rank, "seconds": most.compute, "imbalance": imbalance, "layers": layers}

    @property
    def latency(self) -> float | None:
        """The part of the seconds of transfers that is latency, by how they follow it; None where that is not known."""
        share = self.program.plan.prediction.weights.get("latency")
        return None if share is None else min(1.0, max(0.0, share[2]))

    @cached_property
    def _memory(self) -> tuple[RankMemory, ...]:
        """Memory of every rank, with one optimizer copy of its trainable parameters (SGD with momentum)."""
        return memory_of_all(self.program)

    @cached_property
    def _wires(self) -> list[tuple[WireOp, ...]]:
        return [wire(self.program, rank) for rank in range(self.program.plan.world)]

    @cached_property
    def _received(self) -> dict[int, float]:
        """Bytes that each rank receives; in a collective as many as it sends."""
        received: dict[int, float] = defaultdict(float)
        for rank, ops in enumerate(self._wires):
            for op in (op for op in ops if op.kind != "recv"):
                received[op.ranks[0] if op.kind == "send" else rank] += op.per_step
        return received

    def _sent(self, layer: Layer, gradient: int) -> float:
        """Bytes that the layer's busiest rank sends: its gradient, its outputs and the collectives on them."""
        plan = self.program.plan
        place = plan.placements[layer.name]
        ranks = plan.roles[place.role]
        values = max(sum(op.sent_for(layer.name) for op in self._wires[r]) for r in (ranks[0], ranks[-1]))
        values += sum(feature.sent_bytes(self.program, layer) for feature in features())
        own = gradient / place.num_shards
        if place.sync == "all_reduce":
            if form := FORMATS.get(plan.wire.gradients):
                own *= (form.size + form.scale / BLOCK) / 4
            values += _ring(own, len(plan.replicas(place.role, ranks[0]))) / plan.accumulate
        return values


def _ring(nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends in a ring all-reduce."""
    return Collective.ALL_REDUCE.sent(nbytes, nbytes, ranks)
