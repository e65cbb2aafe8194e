"""Normalise BatchNorm over the whole global batch where the plan says so, which makes it exact.

This pass rewrites the BatchNorm modules of every role that has several ranks:

    bn1 = self.bn1(conv1)     ->     bn1 = batch_norm(conv1, self.bn1)

Without it BatchNorm normalises over the examples of one rank in one forward, as under DDP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.checks.graph import graph_is_sound
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, set_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import PlacedProgram


@dataclass(frozen=True)
class SynchroniseNorms(Pass[PlacedProgram, PlacedProgram]):
    """Replace BatchNorm modules by batch_norm nodes.

    Raises PlacementError for one that is a function, and for one in a role that computes several microbatches.
    """

    name: ClassVar[str] = "synchronise-norms"
    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound,)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        plan = program.plan
        if not plan.synchronised:
            return program
        graph, _ = copy_graph(program.graph)
        for node in list(graph.nodes):
            if node.target is F.batch_norm:
                raise PlacementError(
                    f"{info(node).source}: F.batch_norm cannot be synchronised; make it a module, as nn.BatchNorm2d"
                )
            module = program.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if not isinstance(module, _BatchNorm):
                continue
            role = info(node).role
            if role in plan.groups and plan.groups[role].num_microbatches > 1:
                raise PlacementError(
                    f"{info(node).source}: {node.target} lies in role {role}, which computes microbatches, so it "
                    f"cannot be synchronised; use scheme=BK"
                )
            if len(plan.replicas(role, plan.roles[role][0])) > 1:
                _replace(graph, node)
        return replace(program, graph=graph)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        module = graph.create_node("get_attr", str(node.target))
        set_info(module, info(node), spec=None, copied_to_each_stage=False, is_module=True)
        new = graph.call_function(comm_ops.batch_norm, (node.args[0], module))
    set_info(new, info(node))
    name = node.name
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    new.name = name
