"""Check that every rank of a lowered program has enough memory for a step.

The planner sums bytes layer by layer; this module runs each rank's step on fake tensors (`rank_memory`), once for all
ranks with equal memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial

from splitc import units
from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.rank_memory import memory_of
from splitc.errors import PlacementError, bullets
from splitc.ir.cluster import Cluster
from splitc.ir.features import features
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.roles import ranks_text
from splitc.ir.wire import nbytes_trained, wire


def memory_of_all(program: LoweredProgram) -> tuple[RankMemory, ...]:
    """Return the memory of every rank."""
    memory = cache(partial(memory_of, program))
    return tuple(memory(like) for like in _alike(program))


def require_memory(program: LoweredProgram, have: Callable[[int], float]) -> None:
    """Raise PlacementError when the peak of a rank exceeds its memory.  have: rank -> its memory (bytes).

    Ranks for which a cheap upper bound fits are not run.
    """
    bound, memory = cache(partial(_bound, program)), cache(partial(memory_of, program))
    short: dict[tuple[int, float], list[int]] = defaultdict(list)
    for rank, like in enumerate(_alike(program)):
        if bound(like) > have(rank) and memory(like).peak > have(rank):
            short[like, have(rank)].append(rank)
    if short:
        raise PlacementError(
            bullets(
                f"the plan {program.plan.strategy} does not fit into memory; use a smaller global_batch, more "
                f"ranks, or a strategy that shards or moves the largest layers:",
                [_shortage(program, ranks, memory(like), has) for (like, has), ranks in short.items()],
            )
        )


def require_memory_on(program: LoweredProgram, cluster: Cluster | None, memory: float | None) -> None:
    """Raise PlacementError when a rank needs more than `memory` bytes, or than its device in the cluster has."""
    if (have := _memory_on(program, cluster, memory)) is not None:
        require_memory(program, have)


def most_memory_on(program: LoweredProgram, cluster: Cluster | None, memory: float | None) -> tuple[int, ...]:
    """What each rank of a program that fits takes at most (bytes), without a run; none where nothing limits it."""
    have, bound = _memory_on(program, cluster, memory), cache(partial(_bound, program))
    return tuple(int(min(bound(like), have(rank))) for rank, like in enumerate(_alike(program))) if have else ()


def _memory_on(program: LoweredProgram, cluster: Cluster | None, memory: float | None) -> Callable[[int], float] | None:
    """Rank -> the memory that it may take (bytes)."""
    computing = sum(len(part.ranks) for part in program.rank_programs)
    if memory is not None:
        return lambda rank: memory
    return None if cluster is None else lambda rank: cluster.device_of(rank, computing).memory


def _shortage(program: PlacedProgram, ranks: list[int], memory: RankMemory, have: float) -> str:
    who = f"{ranks_text(tuple(ranks))} ({' and '.join(program.plan.duties(ranks[0]))})"
    kinds = [(size, name.replace("_", " ")) for name, size in asdict(memory).items() if name != "peak" and size]
    listed = ", ".join(f"{name} {units.nbytes(size)}" for size, name in sorted(kinds, key=lambda kind: -kind[0]))
    verbs = ("needs", "has") if len(ranks) == 1 else ("need", "have")
    needs = f"{who} {verbs[0]} {units.nbytes(memory.peak)} at the peak of a step"
    return f"{needs} and {verbs[1]} {units.nbytes(have)}; peak of each kind: {listed}"


# -- equivalent ranks --------------------------------------------------------------------------------------------------


def _alike(program: LoweredProgram) -> list[int]:
    """Return, for every rank, the first with equal memory: with its rank program, and its sizes in each role."""
    plan = program.plan
    programs = {rank: each for each in program.rank_programs for rank in each.ranks}

    def kind(name: str, rank: int) -> object:
        held = tuple(shape for feature in features() for shape, _ in feature.holds(program, rank))
        return name, held, *(_sizes(plan, role, rank) for role in plan.roles_of(rank))

    kinds = (kind(programs[rank].name, rank) if rank in programs else None for rank in range(plan.world))
    first: dict[object, int] = {}
    return [first.setdefault(each, rank) for rank, each in enumerate(kinds)]


def _sizes(plan: Plan, role: str, rank: int) -> tuple[object, ...]:
    """The batch sizes, group index and message sizes of a rank in one role."""
    return (
        plan.batch(role, rank),
        plan.group(role, rank).index(rank),
        tuple(plan.sizes(role, rank)),
        tuple((peer == rank, b - a) for other in plan.roles for peer, a, b in plan.routes(rank, role, other)),
        any(feature.is_first(plan, role, rank) for feature in features()),
        plan.replicas(role, rank).index(rank) if plan.all_reduce == "recursive_doubling" else None,
    )


# -- an upper bound that needs no run ----------------------------------------------------------------------------------


def _bound(program: LoweredProgram, rank: int) -> float:
    """Upper bound of a rank's peak (bytes): everything that it holds, computes, saves and exchanges in a step.

    What is held counts with a copy in the optimizer, and three gradients: as computed, as accumulated, and as a
    temporary copy of the optimizer.  Communicated values count with their buffers.
    """
    plan = program.plan
    held = moved = backward = 0.0
    for role in plan.roles_of(rank):
        stage = program.stage(role)
        held += sum(nbytes_trained(program, stage, name, rank) for name in stage.tensors)
        for layer in stage.layers:
            cost = program.costs[layer].at(plan.peak_batch(role, rank))
            moved += cost.saved_bytes + sum(op.bytes_accessed for op in cost.forward_ops)
            backward = max(backward, sum(op.bytes_accessed for op in cost.backward_ops))
    held += sum(nbytes for feature in features() for _, nbytes in feature.holds(program, rank))
    exchanged = sum((6 if op.form else 2) * op.computed for op in wire(program, rank))  # what is cast has copies
    return 5 * held + moved + backward + exchanged
