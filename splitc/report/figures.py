"""The figures of the report as data: `inspect --json`, schema 1.  SI units, one step, a multiply-add is two FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cost_models.memory import rank_memory, received_nbytes, returned_nbytes
from splitc.plan import Candidate
from splitc.program import Layer, Program
from splitc.strategies import PRICED
from splitc.wire import WireOp, wire


def as_json(program: Program) -> dict[str, Any]:
    """The whole report.  A layer's figures are those of its busiest rank."""
    plan, figures = program.required_plan, Figures(program)
    return {
        "schema": 1,
        "model": program.name,
        "world": plan.world,
        "cluster": plan.cluster,
        "strategy": plan.strategy,
        "proof": plan.proof,
        "gap": plan.gap,
        "global_batch": plan.global_batch,
        "step_seconds": plan.step_seconds,
        "samples_per_second": plan.samples_per_second,
        "roles": {role: list(ranks) for role, ranks in plan.roles.items()},
        "layers": [figures.layer(layer) for layer in program.layers],
        "ranks": [figures.rank(rank) for rank in range(plan.world)],
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
    }


def by_formula(candidate: Candidate) -> bool:
    """Whether its price is that of a paper's formula, and splitc has no plan of it."""
    return candidate.strategy in PRICED and candidate.step_seconds > 0


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": candidate.strategy,
        "step_seconds": candidate.step_seconds,
        "samples_per_second": candidate.samples_per_second,
        "global_batch": candidate.global_batch,
        "exact": candidate.exact,
        "feasible": candidate.feasible,
        "why": candidate.why,
        "roles": {role: len(ranks) for role, ranks in candidate.roles.items()},
        "by_formula": by_formula(candidate),
    }


@dataclass(frozen=True)
class Figures:
    """What one program's layers and ranks hold, compute and send."""

    program: Program

    def layer(self, layer: Layer) -> dict[str, Any]:
        """The figures of a layer on its busiest rank."""
        program, plan = self.program, self.program.required_plan
        place = plan.placements[layer.name]
        assert place.role is not None
        ranks = plan.roles[place.role]
        cost = program.costs[layer.name].at(plan.largest_batch(place.role))
        held = [program.holdings[h] for h in layer.holdings if program.holdings[h].parameter]
        gradient = sum(h.nbytes for h in held if h.trainable)
        ring = _ring(gradient, plan.world)
        return {
            "name": layer.name,
            "source": layer.source,
            "role": place.role,
            "holding": place.holding,
            "sync": place.sync,
            "parameters": sum(h.numel for h in held),
            "flops": cost.flops,
            "ccr": cost.flops / ring if ring else None,
            "sent_bytes": int(_ring(gradient, len(ranks)) + self._crossing(layer)),
            "seconds": plan.seconds.get(layer.name, 0.0),
            "why": plan.reasons.get(layer.name, ""),
        }

    def rank(self, rank: int) -> dict[str, Any]:
        """What one rank holds, and puts on the wire in a step; zeros for one that has no work."""
        program, plan = self.program, self.program.required_plan
        role = next((role for role, ranks in plan.roles.items() if rank in ranks), None)
        figures = {
            "rank": rank,
            "role": role,
            "parameter_bytes": 0,
            "memory_bytes": 0,
            "sent_bytes": int(sum(op.sent for op in self._wires[rank])),
            "received_bytes": int(self._received.get(rank, 0.0)),
        }
        if role is not None:
            held = [program.holdings[h] for h in program.stage(role).holdings]
            figures["parameter_bytes"] = sum(h.nbytes for h in held if h.parameter)
            figures["memory_bytes"] = self._memory(role, plan.batch(rank))
        return figures

    def _memory(self, role: str, batch: int) -> int:
        """Bytes of a rank of `role` with `batch` examples; the optimizer keeps one copy, as SGD with momentum does."""
        program, stage = self.program, self.program.stage(role)
        held = [program.holdings[h] for h in stage.holdings]
        kept = sum(program.costs[layer].at(batch).kept for layer in stage.layers)
        cuts = sum(received_nbytes(cut.spec, batch) for cut in stage.receives)
        cuts += sum(returned_nbytes(cut.spec, batch) for cut in stage.sends if cut.gradient)
        memory = rank_memory(held, kept, cuts)
        flat = memory.gradients if len(program.required_plan.roles[role]) > 1 else 0
        return int(memory.total + flat)

    @cached_property
    def _wires(self) -> list[tuple[WireOp, ...]]:
        return [wire(self.program, rank) for rank in range(self.program.required_plan.world)]

    @cached_property
    def _received(self) -> dict[int, float]:
        """Bytes that come to each rank; a ring brings what it takes."""
        received: dict[int, float] = {}
        for rank, ops in enumerate(self._wires):
            for op in ops:
                if op.kind == "send":
                    received[op.ranks[0]] = received.get(op.ranks[0], 0.0) + op.sent
                elif op.kind == "collective":
                    received[rank] = received.get(rank, 0.0) + op.sent
        return received

    def _crossing(self, layer: Layer) -> float:
        """Bytes that the busiest rank of the layer sends of values made in it."""
        plan = self.program.required_plan
        return sum(
            cut.spec.nbytes(plan.largest_batch(stage.role))
            for stage in self.program.stages
            for cut in stage.sends
            if cut.value in layer.nodes
        )


def _ring(nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends for a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * nbytes
