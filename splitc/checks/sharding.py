"""Checks of sharded layers: propagate the layout of each value and gradient through every role with groups.

replicated   all features, equal on every rank of the group
sharded      this rank's features only
partial      all features, as terms of a sum over the group
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.elementwise import is_elementwise, keeps_features
from splitc.ir.graph import cut_of, info
from splitc.ir.linears import as_linear
from splitc.ir.neurons import embedding_weight, is_batch_norm
from splitc.ir.program import PlacedProgram, Program, TensorSpec

Layout = Literal["replicated", "sharded", "partial"]


def shards_are_gathered(program: PlacedProgram) -> list[str]:
    """Every node reads each value in the layout it needs: none reads a shard or a partial sum where it needs all."""
    return [problem for role in program.plan.groups for problem in _values(program, role)]


def partial_gradients_are_summed(program: PlacedProgram) -> list[str]:
    """The gradient of every value that sharded layers read is summed over the group exactly once."""
    return [problem for role in program.plan.groups for problem in _gradients(program, role)]


def _values(program: PlacedProgram, role: str) -> Iterator[str]:
    layouts: dict[fx.Node, Layout] = {}
    for node in _nodes(program, role):
        if node.target in (comm_ops.recv, comm_ops.modulo):
            layouts[node] = "replicated"
            continue
        inputs = [value for value in node.all_input_nodes if value.op != "get_attr"]
        read = [value for value in inputs if isinstance(info(value).spec, TensorSpec)]
        reads = {value: layouts.get(value, "replicated") for value in read}
        needed, layouts[node] = _rule(program, node, set(reads.values()))
        for value, layout in reads.items():
            if layout != needed:
                yield (
                    f"role {role}: {node.name} ({info(node).source}) needs {value.name} {needed}, but it is {layout}"
                )
    for node in _nodes(program, role):
        layout = layouts.get(node, "replicated")
        if layout != "replicated" and any(user.op == "output" for user in node.users):
            yield f"role {role}: {node.name} ({info(node).source}) is the loss, but it is {layout}"


def _rule(program: PlacedProgram, node: fx.Node, layouts: set[Layout]) -> tuple[Layout, Layout]:
    """Return the layout that a node needs of its inputs, and that of its output."""
    if node.target is comm_ops.shard:
        return "sharded", "replicated"
    if node.target is comm_ops.reduce_from_group:
        return "partial", "replicated"
    split = _split(program, node)
    if split == "columns":
        return "replicated", "sharded"
    if split == "rows":
        return "sharded", "partial"
    if layouts == {"sharded"} and (is_elementwise(node) or keeps_features(node)):
        return "sharded", "sharded"
    if node.target is comm_ops.slice_features:
        return "replicated", "sharded"
    if info(node).sharded and embedding_weight(program, node) is not None:
        return "replicated", "sharded"
    if info(node).sharded and is_batch_norm(program, node):
        return "sharded", "sharded"
    return "replicated", "replicated"


def _gradients(program: PlacedProgram, role: str) -> Iterator[str]:
    for node in _nodes(program, role):
        spec = info(node).spec
        if not isinstance(spec, TensorSpec) or not spec.requires_grad:
            continue
        sharded = [user for user in node.users if _split(program, user) == "columns"]
        summed = (
            node.target is comm_ops.copy_to_group
            or (node.target is comm_ops.shard and node.kwargs["partial"])
            or (node.target is comm_ops.modulo and cut_of(node).partial)
        )
        if sharded and not summed:
            yield (
                f"role {role}: {sharded[0].name} ({info(sharded[0]).source}) is sharded by columns and reads "
                f"{node.name}, whose gradient is never summed over the group"
            )
        others = [user for user in node.users if user not in sharded]
        if summed and others:
            yield (
                f"role {role}: the gradient of {node.name} ({info(node).source}) is summed over the group, but "
                f"its reader {others[0].name} computes all of it on every rank"
            )


def _nodes(program: Program, role: str) -> Iterator[fx.Node]:
    for node in program.graph.nodes:
        is_value = node.op not in ("get_attr", "output") and node.target not in (comm_ops.all_reduce, comm_ops.push)
        if info(node).role == role and is_value:
            yield node


def _split(program: PlacedProgram, node: fx.Node) -> str | None:
    """Return how the plan shards the linear layer `node`, by columns or rows; None for any other node."""
    place = program.plan.placements.get(info(node).layer)
    if place is None or place.holding != "sharded" or as_linear(program, node) is None:
        return None
    if place.split == "rows":
        return "rows" if node.target is F.linear else None
    return "columns"
