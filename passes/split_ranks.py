"""Split the graph with its communication into one graph for each role.

This pass rewrites: a `PlacedProgram` becomes a `LoweredProgram` with a stage for each role, and a rank program for each
combination of roles that ranks have.  A stage has the nodes of its role in order; values enter by `recv` nodes, without
the sender's side, and leave by `send` nodes:

    conv1 = self.conv1(images)                    conv    conv1 = self.conv1(images)
    sent_cut0 = send(conv1, role="fc")     ->             sent_cut0 = send(conv1, role="fc")
    cut0 = recv(sent_cut0, role="conv")           fc      cut0 = recv(None, role="conv")

Parameters and buffers keep the model's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from splitc.checks.graph import cuts_are_communicated, shapes_hold, stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.graph import copy_node, cut_of, info, tensors_of_node
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, PlacedProgram, Stage
from splitc.ir.schedule.actions import RankProgram


@dataclass(frozen=True)
class SplitRanks(Pass[PlacedProgram, LoweredProgram]):
    """Make one Stage for each role of the plan."""

    requires: ClassVar[tuple[Check, ...]] = (cuts_are_communicated,)
    ensures: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph, shapes_hold)

    def run(self, program: PlacedProgram) -> LoweredProgram:
        plan = program.plan
        stages = tuple(_stage(program, role) for role in plan.roles)
        names = {ranks: "_".join(roles) for roles, ranks in plan.decided.ranks_by_roles.items()}
        rank_programs = tuple(RankProgram(roles, ranks, names[ranks]) for roles, ranks in plan.ranks_by_roles.items())
        return program.lowered(stages, rank_programs)


def _stage(program: PlacedProgram, role: str) -> Stage:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    names: dict[str, None] = {}
    shards: dict[str, int] = {}
    loss = program.loss
    for node in program.graph.nodes:
        if info(node).role != role or node.op == "output":
            continue
        mapping[node] = copy_node(graph, node, mapping)
        if node.op in ("call_module", "get_attr"):
            names.update(dict.fromkeys(tensors_of_node(program, node)))
        shards.update(info(node).shards)
    has_loss = loss in mapping
    graph.output(mapping[loss] if has_loss else None)
    nodes = list(mapping)
    return Stage(
        role=role,
        graph=graph,
        layers=tuple(layer.name for layer in program.layers if program.plan.placements[layer.name].role == role),
        inputs=tuple(str(node.target) for node in nodes if node.op == "placeholder"),
        receives=tuple(cut_of(node) for node in nodes if node.target is comm_ops.recv),
        sends=tuple(cut_of(node) for node in nodes if node.target is comm_ops.send),
        tensors=tuple(name for name in program.tensors if name in names),
        shards=shards,
        has_loss=has_loss,
    )
