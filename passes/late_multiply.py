"""Let layers exchange their inputs and output errors instead of their gradients (Practical Lessons 2.1).

This pass rewrites the layers whose placement has sync "late_multiply":

    fc6 = classifier_1(cut0)     ->     fc6 = late_multiply(cut0, classifier_1_weight, classifier_1_bias)
    user = users(ids).sum(1)     ->     user = late_embedding(ids, users_weight, pool="sum")

In backward every rank gathers X and E of all ranks while it computes the layers below, then multiplies: W' = E^T X.  Of
a table it gathers indices, and adds E to the rows that they name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import graph_is_sound
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, put_in_place, set_info
from splitc.ir.linears import Linear, Table, as_late, parameter_nodes
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram


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
        return replace(program, graph=graph)

    @staticmethod
    def _is_alone(plan: Plan, place: LayerPlacement) -> bool:
        """Whether each rank has a part of the layer that no other one trains."""
        return place.holding == "sharded" and plan.grouping(place.role).size > 1 and not plan.trains_copies(place.role)
