"""The groups of examples that the ranks form: each BatchNorm call normalises over one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.ir import comm_ops
from splitc.ir.graph import called_module, info, region_of
from splitc.ir.placements import Grouping
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, Program, SizeSpec, TensorSpec
from splitc.runtime.collectives.layouts import State
from splitc.runtime.spec import StepContext


@dataclass(frozen=True)
class NormGroup:
    """Rows of a batch that one BatchNorm call normalises over together.

    counts: whether they update the running statistics, as those of the first replica do.
    """

    rows: Tensor
    counts: bool


def norm_groups(program: PlacedProgram, local_batches: Sequence[int], unit: Sequence[int]) -> list[list[NormGroup]]:
    """The groups of every batch_norm call of the model, in order, in the examples of a unit of ranks."""
    return [_groups(program.plan, node, rows, local_batches, unit) for node, rows in _norms(program)]


def _norms(program: Program) -> Iterator[tuple[fx.Node, SizeSpec]]:
    """The node of every BatchNorm call, and the rows that it normalises; a region may have several."""
    for node in program.graph.nodes:
        is_module = isinstance(called_module(program.root, node), _BatchNorm)
        if (own := region_of(program, node)) is not None:
            yield from ((node, rows) for rows in own.norms)
        elif is_module or node.target in (F.batch_norm, comm_ops.batch_norm):
            spec = info(node).spec
            if not isinstance(spec, TensorSpec):
                yield node, SizeSpec(1)
            else:
                yield node, SizeSpec(0, spec.shape[0]) if spec.batch_dim is None else SizeSpec(spec.rows)


def _step(plan: Plan, local_batches: Sequence[int]) -> StepContext:
    return StepContext(plan.batch_offsets[plan.reader], tuple(accumulate(local_batches, initial=0)))


def unit_examples(plan: Plan, local_batches: Sequence[int], unit: Sequence[int]) -> tuple[int, int]:
    """The examples of a unit of ranks."""
    step = _step(plan, local_batches)
    parts = [step.interval(plan.interval(plan.reader, rank)) for rank in plan.roles[plan.reader] if rank in unit]
    return min(first for first, _ in parts), max(last for _, last in parts)


def _groups(
    plan: Plan, node: fx.Node, of: SizeSpec, local_batches: Sequence[int], unit: Sequence[int]
) -> list[NormGroup]:
    """The examples that the ranks of a role run in one forward: of each group in each microbatch."""
    role, rows = plan.placements[info(node).layer].role, of.scale
    if not rows:  # it normalises a weight
        return [NormGroup(torch.arange(of.offset), counts=True)]
    step, (start, end) = _step(plan, local_batches), unit_examples(plan, local_batches, unit)
    ranks = tuple(rank for rank in plan.roles[role] if rank in unit)
    grouping = Grouping(1, "BK") if info(node).state is State.BATCH else plan.grouping(role)  # a rank's own, or all
    if plan.synchronised:
        return [NormGroup(torch.arange((end - start) * rows), counts=True)]
    index = torch.arange((end - start) * rows).unflatten(0, (max(info(node).outer, 1), end - start, -1))
    found = []
    for first in range(0, len(ranks), grouping.size):
        members = ranks[first : first + grouping.size]
        compiled = plan.pieces(role, members[0])
        pieces = replace(compiled, bounds=tuple(map(step.moved, compiled.bounds)))
        examples = [step.interval(plan.interval(role, rank)) for rank in members]
        for k in range(pieces.number):
            parts = [part for each in examples for part in pieces.examples(each, k)]
            if indices := [index[:, a - start : b - start] for a, b in parts if a < b]:
                found.append(NormGroup(torch.cat(indices, 1).flatten(), counts=first == 0))
    return found


def further_calls(program: PlacedProgram, all_groups: Sequence[Sequence[NormGroup]]) -> dict[str, int]:
    """BatchNorm module -> its calls in a step on the first replica after the first: one for each further microbatch."""
    found: dict[str, int] = {}
    for (node, _), groups in zip(_norms(program), all_groups, strict=True):
        more = sum(group.counts for group in groups) - 1
        if more > 0 and node.op == "call_module":
            found[str(node.target)] = found.get(str(node.target), 0) + more
    return found
