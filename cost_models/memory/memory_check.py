"""Whether every rank of a rewritten program has the memory for its steps.

The planner weighs sums, layer by layer; here what the plan came to is followed (`rank_memory`).  Ranks that differ in
nothing that matters are followed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from splitc import units
from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.rank_memory import memory_of
from splitc.errors import PlacementError, bullets
from splitc.ir.plan import SERVER, Plan, ranks_text
from splitc.ir.program import Program
from splitc.ir.server_rows import pieces
from splitc.ir.wire import numel_on, wire


def memory_of_all(program: Program, optimizer_copies: int = 1) -> tuple[RankMemory, ...]:
    """The memory of every rank."""
    found: dict[object, RankMemory] = {}
    for rank, kind in enumerate(kinds := _kinds(program)):
        if kind not in found:
            found[kind] = memory_of(program, rank, optimizer_copies)
    return tuple(found[kind] for kind in kinds)


def require_memory(program: Program, have: Callable[[int], float], optimizer_copies: int = 1) -> None:
    """Raise PlacementError when ranks of a rewritten program need more bytes at once than `have` says of them.

    Ranks whose layers move too few bytes to come near that are not followed.
    """
    bounds: dict[object, float] = {}
    found: dict[object, RankMemory] = {}
    short: dict[tuple[object, float], list[int]] = {}
    for rank, kind in enumerate(_kinds(program)):
        if kind not in bounds:
            bounds[kind] = _bound(program, rank, optimizer_copies)
        if bounds[kind] <= have(rank):
            continue
        if kind not in found:
            found[kind] = memory_of(program, rank, optimizer_copies)
        if found[kind].peak > have(rank):
            short.setdefault((kind, have(rank)), []).append(rank)
    if short:
        lines = [_shortage(program, ranks, found[kind], has) for (kind, has), ranks in short.items()]
        raise PlacementError(
            bullets(
                f"the plan {program.required_plan.strategy} does not fit into memory; give a step fewer examples "
                f"(global_batch), take more ranks, or ask for a strategy that divides or moves what is largest:",
                lines,
            )
        )


def _shortage(program: Program, ranks: list[int], memory: RankMemory, have: float) -> str:
    plan = program.required_plan
    roles = [*plan.roles_of(ranks[0]), *([SERVER] if ranks[0] in plan.servers else [])]
    parts = {
        "parameters": memory.parameters,
        "buffers": memory.buffers,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer_state,
        "activations": memory.activations,
        "communication": memory.communication,
    }
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {units.nbytes(size)}" for name, size in largest_first if size)
    verbs = ("needs", "has") if len(ranks) == 1 else ("need", "have")
    return (
        f"{ranks_text(tuple(ranks))} ({' and '.join(roles)}) {verbs[0]} {units.nbytes(memory.peak)} at the peak of a "
        f"step and {verbs[1]} {units.nbytes(have)}; the most of each kind at any one time: {listed}"
    )


# -- ranks that are alike ----------------------------------------------------------------------------------------------


def _kinds(program: Program) -> list[object]:
    """For every rank what its memory depends on: its part, and the sizes of what it holds, works on and exchanges."""
    plan = program.required_plan
    parts = {rank: part for part in program.rank_programs for rank in part.ranks}
    return [
        (parts[rank].name, *(_rows(program, rank) if r == SERVER else _seat(plan, r, rank) for r in parts[rank].roles))
        if rank in parts
        else None
        for rank in range(plan.world)
    ]


def _rows(program: Program, rank: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of the rows that a server holds."""
    buckets = [bucket for stage in program.stages for bucket in stage.served]
    spread = [piece for bucket in buckets for piece in pieces(program, bucket, program.required_plan.servers)]
    return tuple(piece.shape for piece in spread if piece.server == rank)


def _seat(plan: Plan, role: str, rank: int) -> tuple[object, ...]:
    """The sizes that a rank has as one of a role."""
    turns = range(plan.groups[role].turns if role in plan.groups else 1)
    return (
        plan.batch(role, rank),
        plan.group(role, rank).index(rank),
        tuple(b - a for turn in turns for a, b in plan.turn(role, rank, turn)),
        tuple((peer == rank, b - a) for other in plan.roles for peer, a, b in plan.routes(rank, role, other)),
        plan.replicas(role, rank).index(rank) if plan.all_reduce == "recursive_doubling" else None,
    )


# -- a bound that needs no run -----------------------------------------------------------------------------------------


def _bound(program: Program, rank: int, optimizer_copies: int) -> float:
    """Bytes that a rank cannot need more of at once: of all that it holds, makes, saves and exchanges in a step.

    Gradients count once as they are made, once as they are added up, and once as an optimizer's passing copy; what
    travels counts with its buffer.
    """
    plan = program.required_plan
    held = moved = backward = 0.0
    for role in plan.roles_of(rank):
        stage, group = program.stage(role), plan.group(role, rank)
        held += sum(
            numel_on(program, stage, name, group.index(rank), len(group)) * program.tensors[name].dtype.itemsize
            for name in stage.tensors
        )
        for layer in stage.layers:
            cost = program.costs[layer].at(plan.peak_batch(role, rank))
            moved += cost.saved_bytes + cost.forward_bytes_accessed
            backward = max(backward, cost.backward_bytes_accessed)
    if rank in plan.servers:
        served = [bucket for stage in program.stages for bucket in stage.served]
        spread = [piece for bucket in served for piece in pieces(program, bucket, plan.servers)]
        held += sum(piece.nbytes for piece in spread if piece.server == rank)
    exchanged = sum(math.prod(op.shape) * op.dtype.itemsize for op in wire(program, rank))
    return (4 + optimizer_copies) * held + moved + backward + 2 * exchanged
