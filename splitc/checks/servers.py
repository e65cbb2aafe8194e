"""Checks of parameter servers."""

from __future__ import annotations

from splitc.ir import comm_ops
from splitc.ir.graph import info
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.server_rows import read_by


def servers_fit(program: PlacedProgram) -> list[str]:
    """Served layers have servers; a server on a worker's rank is in every served role."""
    plan = program.plan
    served = {name: str(p.role) for name, p in plan.placements.items() if p.sync == "parameter_server"}
    problems = [
        f"layer {name} is served, but its role {role} has model-parallel groups"
        for name, role in served.items()
        if role in plan.groups
    ]
    problems += [
        f"rank {rank} is a server and in role {' and '.join(plan.roles_of(rank))}, but not in role {role}, whose "
        f"parameters it serves"
        for rank in plan.servers
        for role in dict.fromkeys(served.values())
        if plan.roles_of(rank) and role not in plan.roles_of(rank)
    ]
    return problems


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
                read = read_by(program, node)
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
