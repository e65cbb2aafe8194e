"""Write the file of a rank: its place in the plan, its peers, and its part of the batch."""

from __future__ import annotations

from collections.abc import Mapping

from splitc import units
from splitc.plan import ranks_text
from splitc.program import Program, Stage
from splitc.version import __version__
from splitc.wire import wire


def rank_file(program: Program, rank: int) -> str:
    """What is one rank's own."""
    plan = program.required_plan
    role = plan.role_of(rank)
    stage = program.stage(role)
    start, stop = plan.interval(rank)
    batch = plan.batch(rank)
    ops = wire(program, rank)
    sent = sum(op.sent for op in ops)
    routes = {other: plan.routes(rank, other) for other in _partners(stage)}
    lines = [
        f'"""Rank {rank} of {plan.world} of {program.name}: role "{role}", examples {start} to {stop - 1} of '
        f"{plan.global_batch}.  Written by splitc {__version__}; yours to edit.",
        "",
    ]
    lines += _rank_table(program, stage, routes, rank, batch)
    lines += [
        f"sends    {units.nbytes(sent)} a step, {len(ops)} operations on the wire",
        f"run      torchrun --nproc-per-node {plan.world} launch.py",
        "remake   splitc compile <model file> --plan plan.json",
        '"""',
        "",
    ]
    lines += [
        f"from {role} import Stage, evaluate, step",
        "",
        "from splitc.runtime import Rank",
        "",
        '__all__ = ["Stage", "evaluate", "rank", "step"]',
        "",
        f'PLAN = "{plan.hash}"',
        "",
        "rank = Rank(",
    ]
    lines += _fields(
        {
            "index": (rank, ""),
            "world": (plan.world, ""),
            "role": (f'"{role}"', ""),
            "examples": ((start, stop), "its part of the global batch"),
            "replicas": (plan.roles[role], "ranks that hold the same parameters and sum their gradients"),
            "routes": (_routes(routes), "peer, and the examples that both work on"),
            "readers": (plan.roles[plan.reader], "ranks that read the data"),
            "bounds": (plan.examples[plan.reader], "where each reader's examples begin"),
            "inputs": (_inputs(program, stage), "what a reader reads: shape, dtype, and how high whole numbers go"),
            "owners": (owners_text(program), "who gives which parameters to a whole state_dict"),
        }
    )
    return "\n".join([*lines, ")", ""])


def _fields(fields: Mapping[str, tuple[object, str]]) -> list[str]:
    lines = []
    for name, (value, note) in fields.items():
        text = f"    {name}={value},"
        lines.append(
            f"{text:<44}  # {note}" if note and "\n" not in text else f"    # {note}\n{text}" if note else text
        )
    return lines


def _routes(routes: Mapping[str, tuple[tuple[int, int, int], ...]]) -> str:
    return "{" + ", ".join(f'"{role}": {peers}' for role, peers in routes.items()) + "}"


def _inputs(program: Program, stage: Stage) -> str:
    if not stage.inputs:
        return "{}"
    specs = {i.name: i for i in program.inputs}
    rows = [
        f'        "{name}": ({specs[name].spec.template()}, "{str(specs[name].spec.dtype).removeprefix("torch.")}", '
        f"{specs[name].high}),"
        for name in stage.inputs
    ]
    return "{\n" + "\n".join(rows) + "\n    }"


def owners_text(program: Program) -> str:
    """Which rank gives a role's parameters to a whole state_dict."""
    plan = program.required_plan
    return "{" + ", ".join(f'"{role}": {ranks[0]}' for role, ranks in plan.roles.items()) + "}"


def _partners(stage: Stage) -> list[str]:
    return list(dict.fromkeys([cut.producer for cut in stage.receives] + [cut.consumer for cut in stage.sends]))


def _rank_table(
    program: Program, stage: Stage, routes: Mapping[str, tuple[tuple[int, int, int], ...]], rank: int, batch: int
) -> list[str]:
    inputs = {i.name: i.spec for i in program.inputs}
    rows = [("in", name, inputs[name], "") for name in stage.inputs]
    rows += [
        ("in", cut.name, cut.spec, f"<- {ranks_text(tuple(p for p, _, _ in routes[cut.producer]))}")
        for cut in stage.receives
    ]
    rows += [
        ("out", cut.name, cut.spec, f"-> {ranks_text(tuple(p for p, _, _ in routes[cut.consumer]))}")
        for cut in stage.sends
    ]
    width = max((len(name) for _, name, _, _ in rows), default=0)
    return [
        f"{kind:<9}{name:<{width}}  {spec.at(batch)!s:<22} {str(spec.dtype).removeprefix('torch.'):<8} {note}".rstrip()
        for kind, name, spec, note in rows
    ]


def idle_rank_file(program: Program, rank: int) -> str:
    """A rank that the plan gives no work."""
    plan = program.required_plan
    return (
        f'"""Rank {rank} of {plan.world} of {program.name}: the plan {plan.strategy} gives it no work.  '
        f'Written by splitc {__version__}; yours to edit."""\n\nfrom idle import Stage, evaluate, step\n\n'
        f'from splitc.runtime import Rank\n\n__all__ = ["Stage", "evaluate", "rank", "step"]\n\n'
        f'PLAN = "{plan.hash}"\n\nrank = Rank(\n    index={rank},\n    world={plan.world},\n    role="idle",\n'
        f"    readers={plan.roles[plan.reader]},\n    bounds={plan.examples[plan.reader]},\n"
        f"    owners={owners_text(program)},\n)\n"
    )
