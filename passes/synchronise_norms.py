"""Normalise BatchNorm over the whole global batch where the plan says so, which makes it exact.

This pass rewrites the BatchNorm modules of every role that has several ranks:

    bn1 = self.bn1(conv1)     ->     bn1 = batch_norm(conv1, self.bn1)

Without it BatchNorm normalises over the examples of one rank in one forward, as under DDP.  Running statistics of an
InstanceNorm are means over examples: it must see the whole batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from splitc.checks.graph import graph_is_sound
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import changes_statistics, copy_graph, info, put_in_place, set_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram
from splitc.ir.regions import Region
from splitc.runtime.collectives.layouts import State


@dataclass(frozen=True)
class SynchroniseNorms(Pass[PlacedProgram, PlacedProgram]):
    """Replace BatchNorm modules by batch_norm nodes.

    Raises PlacementError for one that is a function, for one in a role that computes several microbatches, and for an
    InstanceNorm whose running statistics no rank sees whole.
    """

    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound,)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        plan = program.plan
        for node in program.graph.nodes:
            if _averages_examples(program, node):
                _require_whole_batch(plan, node)
        if not plan.synchronised:
            return program
        graph, _ = copy_graph(program.graph)
        for node in list(graph.nodes):
            if node.target is F.batch_norm:
                raise PlacementError(
                    f"{info(node).source}: F.batch_norm cannot be synchronised; make it a module, as nn.BatchNorm2d"
                )
            module = program.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, Region) and module.own.norms:
                raise PlacementError(
                    f"{info(node).source}: the BatchNorm inside {node.target} cannot be synchronised, since it stays "
                    f"the user's own code ({module.own.why})"
                )
            if not isinstance(module, _BatchNorm):
                continue
            role = info(node).role
            if plan.turns(role) > 1:
                raise PlacementError(
                    f"{info(node).source}: {node.target} lies in role {role}, which computes microbatches, so it "
                    f"cannot be synchronised; use scheme=BK and microbatches=1"
                )
            if plan.trains_copies(role) or info(node).state is State.BATCH:
                _replace(graph, node)
        return replace(program, graph=graph)


def _averages_examples(program: PlacedProgram, node: fx.Node) -> bool:
    """Whether the node is an InstanceNorm that updates running statistics."""
    if node.op != "call_module":
        return node.target is F.instance_norm and changes_statistics(node)
    module = program.root.get_submodule(str(node.target))
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats


def _require_whole_batch(plan: Plan, node: fx.Node) -> None:
    role = info(node).role
    if plan.trains_copies(role) or plan.turns(role) > 1:
        raise PlacementError(
            f"{info(node).source}: {node.name} is an InstanceNorm with running statistics, means over all examples, "
            f"and each rank or microbatch of role {role} has a part of them; set track_running_stats=False, or give "
            f"the role one rank"
        )


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        module = graph.create_node("get_attr", str(node.target))
        set_info(module, info(node), spec=None, copied_to_each_stage=False, is_module=True)
        is_own = info(node).state is State.BATCH
        new = graph.call_function(comm_ops.batch_norm, (node.args[0], module), {"own": True} if is_own else None)
    set_info(new, info(node))
    put_in_place(graph, node, new)
