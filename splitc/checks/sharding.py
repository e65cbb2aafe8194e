"""Checks of sharded layers: what a rank has of each value, and of its gradient, followed through every grouped role.

whole     all features, alike on every rank of the group
part      this rank's features
partial   all features, of which the ranks' values are to be summed
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.elementwise import is_elementwise
from splitc.ir.linears import as_linear
from splitc.ir.program import PlacedProgram, Program, TensorSpec


def parts_are_gathered(program: PlacedProgram) -> list[str]:
    """No node reads a part, or a partial sum, of a value whose whole it needs; every division has its communication."""
    return [problem for role in program.plan.groups for problem in _values(program, role)]


def partial_gradients_are_summed(program: PlacedProgram) -> list[str]:
    """Where sharded layers read a value, its gradient is summed over the group exactly once."""
    return [problem for role in program.plan.groups for problem in _gradients(program, role)]


def _values(program: PlacedProgram, role: str) -> Iterator[str]:
    has: dict[fx.Node, str] = {}
    for node in _nodes(program, role):
        if node.target in (comm_ops.recv, comm_ops.modulo):
            has[node] = "whole"
            continue
        reads = {n: has.get(n, "whole") for n in node.all_input_nodes if isinstance(n.meta.get("spec"), TensorSpec)}
        wanted, makes = _rule(program, node, set(reads.values()))
        for value, state in reads.items():
            if state != wanted:
                yield (
                    f"role {role}: {node.name} ({node.meta['source']}) needs the {wanted} of {value.name}, but a rank "
                    f"has {_words(state)}"
                )
        has[node] = makes
    for node in _nodes(program, role):
        if node in has and has[node] != "whole" and any(user.op == "output" for user in node.users):
            yield f"role {role}: {node.name} ({node.meta['source']}) is the loss, but a rank has {_words(has[node])}"


def _rule(program: PlacedProgram, node: fx.Node, states: set[str]) -> tuple[str, str]:
    """What a node needs of the tensors that it reads, and what it makes."""
    if node.target is comm_ops.shard:
        return "part", "whole"
    if node.target is comm_ops.reduce_from_group:
        return "partial", "whole"
    split = _split(program, node)
    if split == "columns":
        return "whole", "part"
    if split == "rows":
        return "part", "partial"
    if states == {"part"} and is_elementwise(node):
        return "part", "part"
    return "whole", "whole"


def _gradients(program: PlacedProgram, role: str) -> Iterator[str]:
    for node in _nodes(program, role):
        spec = node.meta.get("spec")
        if not isinstance(spec, TensorSpec) or not spec.requires_grad:
            continue
        sharded = [user for user in node.users if _split(program, user) == "columns"]
        summed = (
            node.target is comm_ops.copy_to_group
            or (node.target is comm_ops.shard and node.kwargs["partial"])
            or (node.target is comm_ops.modulo and node.meta["cut"].partial)
        )
        if sharded and not summed:
            yield (
                f"role {role}: {sharded[0].name} ({sharded[0].meta['source']}) is divided by columns and reads "
                f"{node.name}, whose gradient is never summed over the group"
            )
        others = [user for user in node.users if user not in sharded]
        if summed and others:
            yield (
                f"role {role}: the gradient of {node.name} ({node.meta['source']}) is summed over the group, but "
                f"{others[0].name}, which reads it, has the whole of it on every rank"
            )


def _nodes(program: Program, role: str) -> Iterator[fx.Node]:
    for node in program.graph.nodes:
        is_value = node.op not in ("get_attr", "output") and node.target not in (comm_ops.all_reduce, comm_ops.push)
        if node.meta.get("role") == role and is_value:
            yield node


def _split(program: PlacedProgram, node: fx.Node) -> str | None:
    """How the plan divides the linear layer that `node` is."""
    place = program.plan.placements.get(node.meta.get("layer") or "")
    if place is None or place.holding != "sharded" or as_linear(program, node) is None:
        return None
    if place.split == "rows":
        return "rows" if node.target is F.linear else None
    return "columns"


def _words(state: str) -> str:
    return {"part": "its part of the features only", "partial": "a part of a sum", "whole": "all of it"}[state]
