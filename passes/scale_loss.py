"""Scale the loss once, at its own nodes, so that the ranks' contributions sum to the global loss.

This pass rewrites.  After it every gradient synchronisation is a sum and nothing is divided by the number of ranks:

    mean      mse_loss(out, target)         ->  scale_by_share(mse_loss(out, target))
    weighted  cross_entropy(out, target)    ->  cross_entropy(out, target, reduction="sum") / global_weight(target)
    quotient  masked.sum() / mask.sum()     ->  masked.sum() / all_reduce_scalar(mask.sum())

Where one rank has the whole batch the loss stays as it is.  Where its role computes several microbatches, the
denominators are computed once, of the whole batch, before the first one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, insert_after, set_info, tensor_spec, update_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import PlacedProgram, TensorSpec


@dataclass(frozen=True)
class ScaleLoss(Pass[PlacedProgram, PlacedProgram]):
    """Rewrite every term of the loss for the role that computes it."""

    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound,)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        plan = program.plan
        layer = info(program.loss).layer
        microbatched = plan.turns(plan.placements[layer].role) > 1
        if plan.sees_whole_batch(layer):
            return program
        graph, _ = copy_graph(program.graph)
        nodes = {node.name: node for node in graph.nodes}
        for term in program.loss_terms:
            node = nodes[term.node]
            if term.kind.startswith("weighted"):
                node = _divide_by_weight(graph, node)
            for function in _AFTER.get(term.kind, ()):
                node = _after(graph, node, function)
        if microbatched:
            for node in list(graph.nodes):
                if node.target in comm_ops.DENOMINATORS:
                    _compute_once(graph, node, node)
        return replace(program, graph=graph)


def _compute_once(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    """Let a denominator be computed of the whole batch: a microbatch has only some of the examples that it counts.

    What it is computed of is computed for it apart, since the loss may read it by microbatch too.
    """
    update_info(node, once=True, copied_to_each_stage=False)
    for value in [value for value in node.all_input_nodes if value.op != "placeholder"]:
        spec = info(value).spec
        if value.target == "to" and any(each.target is getattr for each in value.all_input_nodes):
            node.replace_input_with(value, value.all_input_nodes[0])  # labels.to(logits.device): a rank has one device
            return _compute_once(graph, node, total)
        if value.op == "call_module" or not isinstance(spec, TensorSpec) or spec.requires_grad:
            raise PlacementError(
                f"{info(total).source}: the loss divides by a sum that depends on {value.name} "
                f"({info(value).source}), so it cannot be summed by microbatch; use scheme=BK and microbatches=1"
            )
        if value.op != "get_attr":
            with graph.inserting_before(node):
                apart = graph.node_copy(value)
            set_info(apart, info(value))
            node.replace_input_with(value, apart)
            if not value.users:
                graph.erase_node(value)
            _compute_once(graph, apart, total)


def _divide_by_weight(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target = node.args[1] if len(node.args) > 1 else node.kwargs["target"]
    weight = node.kwargs.get("weight")
    ignore_index = node.kwargs.get("ignore_index", -100)
    options = {} if ignore_index == -100 else {"ignore_index": ignore_index}
    if weight is not None:
        options["weight"] = weight
    node.update_kwarg("reduction", "sum")
    spec = TensorSpec((), tensor_spec(node).dtype if weight is not None else torch.int64)  # without weights a count
    name = f"{node.name}_weight"
    weights = insert_after(graph, node, comm_ops.global_weight, (target,), name, node, options, spec=spec)
    scaled = insert_after(graph, weights, operator.truediv, (node, weights), "loss", node)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return scaled


def _after(graph: fx.Graph, node: fx.Node, function: Callable[..., Any]) -> fx.Node:
    new = insert_after(graph, node, function, (node,), f"{node.name}_{function.__name__}", node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


_AFTER = {
    "mean": (comm_ops.scale_by_share,),
    "mean denominator": (comm_ops.scale_by_share, comm_ops.all_reduce_scalar),
    "sum denominator": (comm_ops.all_reduce_scalar,),
    "weighted denominator": (comm_ops.all_reduce_scalar,),
}
"""Kind of a term -> what follows it, one after the other; the parts of a sum add up by themselves."""
