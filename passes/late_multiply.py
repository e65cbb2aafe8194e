"""Let layers exchange their inputs and output errors instead of their gradients (Practical Lessons 2.1).

This pass rewrites the layers whose placement has sync "late_multiply":

    fc6 = classifier_1(cut0)     ->     fc6 = late_multiply(cut0, classifier_1_weight, classifier_1_bias)
                                        gather_indices([ids])
    user = users(ids).sum(1)     ->     user = late_embedding(ids, users_weight, pool="sum", gathered=0)

In backward every rank gathers X and E of all ranks while it computes the layers below, then multiplies: W' = E^T X.  Of
a table it gathers indices, from forward on where they are views of inputs, and adds E to the rows that they name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, insert_after, op_name, put_in_place, rename, set_info, tensor_spec
from splitc.ir.linears import Linear, Table, as_late, parameter_nodes
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, TensorSpec
from splitc.ir.torch_ops import ops_with


@dataclass(frozen=True)
class LateMultiply(Pass[PlacedProgram, PlacedProgram]):
    """Replace linear layers and embeddings by nodes of communication ops."""

    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound,)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        placements = program.plan.placements
        late = {name for name, place in placements.items() if place.sync == "late_multiply"}
        alone = {name for name, place in placements.items() if self._is_alone(program.plan, place)}
        if not late | alone:
            return program
        graph, _ = copy_graph(program.graph)
        tables: dict[str, dict[fx.Node, list[fx.Node]]] = defaultdict(dict)  # role -> those with such indices
        for node in list(graph.nodes):
            use, is_late = as_late(program, node), info(node).layer in late
            if use is None or not (is_late or (info(node).layer in alone and isinstance(use, Linear))):
                continue
            weight, bias = parameter_nodes(graph, use)
            options = dict(use.options) if isinstance(use, Table) else {}
            with graph.inserting_before(node):
                function = comm_ops.FUNCTIONS[use.late] if is_late else comm_ops.linear
                new = graph.call_function(function, (use.values[0], weight, bias)[: 3 if bias else 2], options)
            set_info(new, info(use.output))
            put_in_place(graph, use.output, new)
            if use.output is not node:
                graph.erase_node(node)
            if isinstance(use, Table) and (views := _views(use.values[0])):
                tables[info(new).role][new] = views
        for each in tables.values():
            _gather_early(graph, each)
        return replace(program, graph=graph)

    @staticmethod
    def _is_alone(plan: Plan, place: LayerPlacement) -> bool:
        """Whether each rank has a part of the layer that no other one trains."""
        return place.holding == "sharded" and plan.grouping(place.role).size > 1 and not plan.trains_copies(place.role)


def _gather_early(graph: fx.Graph, tables: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Let indices that are views of inputs travel before a role computes; copies of the views are made there."""
    place, indices = next(node for node in reversed(graph.nodes) if len(_views(node)) == 1), list[fx.Node]()
    for k, (table, (value, *views)) in enumerate(tables.items()):
        for view in views:
            with graph.inserting_after(place):
                place = graph.node_copy(view, {view.all_input_nodes[0]: value}.__getitem__)
            rename(graph, place, f"{view.name}_early")
            set_info(place, info(view), layer="")
            value = place
        indices.append(value)
        table.update_kwarg("gathered", k)
    own = TensorSpec((1, sum(math.prod(tensor_spec(each).at(1)) for each in indices)), torch.int32, 0)
    gather = insert_after(graph, place, comm_ops.gather_indices, (indices,), "indices", next(iter(tables)))
    set_info(gather, info(gather), spec=own, layer="", side_effect=True)


def _views(value: fx.Node) -> list[fx.Node]:
    """An input, or what a role received of it, and the views of it that make `value`; none where other ops do."""
    views: list[fx.Node] = []
    while value.op.startswith("call") and op_name(value) in ops_with("view") and len(value.all_input_nodes) == 1:
        views.append(value)
        value = value.all_input_nodes[0]
    given = value.all_input_nodes[0].all_input_nodes[0] if value.target is comm_ops.recv else value
    return [value, *reversed(views)] if given.op == "placeholder" else []
