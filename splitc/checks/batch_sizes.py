"""Check that every batch of a plan takes the branches that were traced, and that BatchNorm can normalise it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from splitc.errors import PlacementError
from splitc.ir.features import features
from splitc.ir.graph import info, normalises_examples, tensor_spec
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, Program
from splitc.runtime.collectives.layouts import State
from splitc.runtime.spec import StepContext, refused_batch


def require_batch_sizes(program: LoweredProgram) -> None:
    """Raise PlacementError when a rank, or one process with the global batch, would take another branch.

    Or when BatchNorm would have one value of a channel to normalise, which torch refuses.
    """
    if why := refused_batch(program.guards, _batch_sizes(program.plan)):
        raise PlacementError(
            f"{why}; compile with an example and a global_batch within that range, or leave the batch size out of that "
            f"line"
        )
    if why := next(_too_few_values(program, program.plan), None):
        raise PlacementError(f"{why}: take a larger global_batch, fewer ranks or microbatches, or sync_batchnorm")


def runs_batches_of(program: LoweredProgram, sizes: Sequence[int]) -> bool:
    """Whether a program also runs steps in which its readers give these numbers of examples."""
    plan = program.plan
    context = StepContext(plan.batch_offsets[plan.reader], tuple(accumulate(sizes, initial=0)))
    offsets = {role: tuple(map(context.moved, bounds)) for role, bounds in plan.batch_offsets.items()}
    allowed = all(map(program.allows, (sum(sizes), *sizes)))
    return allowed and not any(_too_few_values(program, replace(plan, batch_offsets=offsets)))


def step_problems(program: Program, plan: Plan) -> Iterator[str]:
    """Yield why a model cannot run in the microbatches of a plan, or with its features."""
    for feature in features():
        yield from feature.unfit(program, plan)
    if not plan.in_pieces:
        return
    why = f"microbatches is {plan.microbatches}, but"
    if program.part is not None:
        yield f"{why} a function divides the examples (batch=), which only a reader's whole batch has: take 1"
    if program.in_batch:
        yield f"{why} {program.in_batch} needs the whole batch at once: take 1"


def _too_few_values(program: LoweredProgram, plan: Plan) -> Iterator[str]:
    """Yield where BatchNorm would have one value of each channel, or none, which would leave its statistics alone."""
    for stage in program.stages:
        nodes = [node for node in stage.graph.nodes if normalises_examples(program.root, node)]
        runs = _examples_run(plan, stage.role) if nodes else {}
        for node in nodes:
            spec = tensor_spec(node)
            for (own, of_group), rank in runs.items():
                batch, channels, *others = spec.at(own if info(node).state is State.BATCH else of_group)
                values = batch * math.prod(others)
                if values == 1 or (values == 0 and plan.in_pieces):
                    yield (
                        f"{info(node).layer} ({info(node).source}): BatchNorm needs several values of each of its "
                        f"{channels} channels, and rank {rank} ({stage.role}) has {values}"
                    )


def _examples_run(plan: Plan, role: str) -> dict[tuple[int, int], int]:
    """The numbers of examples that a rank of a role, and its group, compute on at once -> the first such rank."""
    found: dict[tuple[int, int], int] = {}
    are_there = cache(lambda pieces, k: bool(pieces.parts(k)))  # else the batch is small
    for rank in plan.roles[role]:
        for k in range(plan.turns(role)):
            if are_there(plan.pieces(role, rank), k):
                own = plan.batch(role, rank, k)
                found.setdefault((own, sum(plan.sizes_at(role, rank, k))), rank)
    return found


def _batch_sizes(plan: Plan) -> dict[int, str]:
    """The batch sizes that a step runs -> who runs them."""
    found = {plan.global_batch: "one process, with which training is to agree,"}
    for role, ranks in plan.roles.items():
        for rank in ranks:
            for sizes in plan.sizes(role, rank):
                found.setdefault(sum(sizes), f"rank {rank} ({role})")
    return {size: who for size, who in found.items() if size}
