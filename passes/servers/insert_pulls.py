"""Let each layer wait for its own parameters: pulls just before the first node that reads them.

This pass rewrites the stages of roles whose parameters servers hold.  The step's `pull` action lets all buckets begin
to arrive, in the order of forward; a node in the stage waits for one of them, so that layers compute while the
parameters of later ones are on their way:

    pool5 = max_pool2d(conv5)              pool5 = max_pool2d(conv5)
    fc6 = classifier_1(pool5)       ->     pull = pull(role="worker", bucket=1)
                                           fc6 = classifier_1(pool5)

In the plain form (`Plan.overlap` False; Stanza 5) the action waits for all of them, and no node is inserted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import buckets_hold_every_gradient, stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.graph import NodeInfo, copy_graph, info, set_info, tensors_of_node
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, Program, Stage


def served_parameters_are_pulled(program: LoweredProgram) -> list[str]:
    """Where parameters arrive layer by layer, each bucket is pulled once, before the first node that reads it."""
    if not program.plan.overlap:
        return []
    problems: list[str] = []
    for stage in program.stages:
        pulled: list[int] = []
        for node in stage.graph.nodes:
            if node.target is comm_ops.pull:
                pulled.append(int(node.kwargs["bucket"]))
            elif node.op not in ("get_attr", "placeholder", "output"):
                read = tensors_of_node(program, node)
                problems += [
                    f"{node.name} ({info(node).source}) in role {stage.role} reads {name} before it is pulled"
                    for k, bucket in enumerate(stage.served)
                    for name in bucket
                    if name in read and k not in pulled
                ]
        problems += [
            f"bucket {k} of role {stage.role} is pulled {pulled.count(k)} times, not once"
            for k in range(len(stage.served))
            if pulled.count(k) != 1
        ]
    return problems


@dataclass(frozen=True)
class InsertPulls(Pass[LoweredProgram, LoweredProgram]):
    """Insert a pull node for each served bucket."""

    requires: ClassVar[tuple[Check, ...]] = (buckets_hold_every_gradient,)
    ensures: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph, served_parameters_are_pulled)

    def run(self, program: LoweredProgram) -> LoweredProgram:
        if not program.plan.overlap:
            return program
        stages = (_with_pulls(program, stage) if stage.served else stage for stage in program.stages)
        return replace(program, stages=tuple(stages))


def _with_pulls(program: Program, stage: Stage) -> Stage:
    graph, _ = copy_graph(stage.graph)
    waiting = {k: set(bucket) for k, bucket in reversed(list(enumerate(stage.served)))}  # in the order of forward
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue  # a parameter that stands by itself is read by its readers
        reader = info(node if node.op != "output" else node.prev)
        read = set(tensors_of_node(program, node)) if node.op != "output" else set().union(*waiting.values())
        for k in [k for k, bucket in waiting.items() if bucket & read]:
            del waiting[k]
            with graph.inserting_before(node):
                pull = graph.call_function(comm_ops.pull, (), {"role": stage.role, "bucket": k})
            set_info(pull, NodeInfo(source=reader.source, layer=reader.layer, role=reader.role, side_effect=True))
    return replace(stage, graph=graph)
