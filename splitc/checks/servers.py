"""Checks of what workers have of servers."""

from __future__ import annotations

from splitc.ir import comm_ops
from splitc.ir.graph import info, tensors_of_node
from splitc.ir.program import LoweredProgram


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
