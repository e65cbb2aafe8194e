"""The figures of the report as data: `inspect --json`, schema 1.  SI units, one step, a multiply-add is two FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cost_models.measured import is_measured
from cost_models.memory import rank_memory, received_nbytes, returned_nbytes
from splitc.plan import SERVER, Candidate, Plan
from splitc.program import Holding, Layer, Program
from splitc.wire import WireOp, shard_of, wire


def as_json(program: Program) -> dict[str, Any]:
    """The whole report.  A layer's figures are those of its busiest rank."""
    plan, figures = program.required_plan, Figures(program)
    return {
        "schema": 1,
        "model": program.name,
        "world": plan.world,
        "cluster": plan.cluster,
        "costs": "measured" if is_measured(program) else "counted",
        "strategy": plan.strategy,
        "proof": plan.proof,
        "gap": plan.gap,
        "global_batch": plan.global_batch,
        "step_seconds": plan.step_seconds,
        "simulated_seconds": plan.simulated_seconds,
        "samples_per_second": plan.samples_per_second,
        "roles": {role: list(ranks) for role, ranks in roles_of(plan).items()},
        "layers": [figures.layer(layer) for layer in program.layers],
        "ranks": [figures.rank(rank) for rank in range(plan.world)],
        "candidates": [_candidate(candidate) for candidate in plan.candidates],
    }


def roles_of(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Its roles, servers included."""
    return {**plan.roles, **({SERVER: plan.servers} if plan.servers else {})}


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
            "group": place.group,
            "parameters": sum(h.numel for h in held),
            "flops": cost.flops,
            "ccr": cost.flops / ring if ring else None,
            "sent_bytes": int(self._sent(layer, gradient)),
            "seconds": plan.seconds.get(layer.name, 0.0),
            "why": plan.reasons.get(layer.name, ""),
        }

    def rank(self, rank: int) -> dict[str, Any]:
        """What one rank holds, and puts on the wire in a step; zeros for one that has no work."""
        plan = self.program.required_plan
        roles = plan.roles_of(rank)
        return {
            "rank": rank,
            "role": " and ".join((*roles, *((SERVER,) if rank in plan.servers else ()))) or None,
            "parameter_bytes": sum(self._parameters(role, rank) for role in roles),
            "memory_bytes": sum(self._memory(role, rank) for role in roles),
            "sent_bytes": int(sum(op.sent for op in self._wires[rank])),
            "received_bytes": int(self._received.get(rank, 0.0)),
        }

    def _parameters(self, role: str, rank: int) -> int:
        """Bytes of the parameters that a rank holds as one of `role`."""
        return sum(h.nbytes for h in self._held(role, rank) if h.parameter)

    def _held(self, role: str, rank: int) -> list[Holding]:
        """Parameters and buffers of a role, or the parts of them that a rank has."""
        program, stage = self.program, self.program.stage(role)
        group = program.required_plan.group(role, rank)
        held = []
        for name in stage.holdings:
            holding, share = program.holdings[name], shard_of(program, stage, name, group.index(rank), len(group))
            if share is not None:
                dim, first, last = share
                shape = tuple(last - first if d == dim else n for d, n in enumerate(holding.shape))
                holding = replace(holding, shape=shape)
            held.append(holding)
        return held

    def _memory(self, role: str, rank: int) -> int:
        """Bytes that a rank needs as one of `role`; the optimizer keeps one copy, as SGD with momentum does."""
        program, stage, plan = self.program, self.program.stage(role), self.program.required_plan
        batch, worked = plan.batch(role, rank), plan.worked(role, rank)
        held = self._held(role, rank)
        kept = sum(program.costs[layer].at(worked).kept for layer in stage.layers)
        cuts = sum(received_nbytes(cut.spec, worked) for cut in stage.receives)
        cuts += sum(returned_nbytes(cut.spec, batch) for cut in stage.sends if cut.gradient)
        memory = rank_memory(held, kept, cuts)
        flat = memory.gradients if len(plan.replicas(role, rank)) > 1 else 0
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

    def _sent(self, layer: Layer, gradient: int) -> float:
        """Bytes that the layer's busiest rank sends: of its gradient, of values made in it, of what gathers them."""
        plan = self.program.required_plan
        place = plan.placements[layer.name]
        assert place.role is not None
        ranks = plan.roles[place.role]
        values = max(sum(op.sent for op in self._wires[r] if op.layer == layer.name) for r in (ranks[0], ranks[-1]))
        if place.sync == "parameter_server":
            return values + gradient
        if place.sync != "all_reduce":
            return values
        part = place.group if place.holding == "sharded" and place.group else 1
        return values + _ring(gradient / part, len(plan.replicas(place.role, ranks[0])))


def _ring(nbytes: float, ranks: int) -> float:
    """Bytes that one rank sends for a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * nbytes
