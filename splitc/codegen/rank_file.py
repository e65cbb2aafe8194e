"""Write the file of a rank: its place in the plan, its peers, and its part of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitc import units
from splitc.ir.constructors import literal
from splitc.ir.plan import SERVER, ranks_text
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.server_rows import pieces
from splitc.ir.wire import shard_of, wire
from splitc.version import __version__


def rank_file(program: LoweredProgram, rank: int) -> str:
    """What is one rank's own."""
    plan, part = program.plan, program.rank_program(rank)
    stages = [program.stage(role) for role in part.roles if role != SERVER]
    ops = wire(program, rank)
    sent = sum(op.sent for op in ops)
    names = " and ".join(f'"{role}"' for role in part.roles)
    intervals = dict.fromkeys(plan.interval(stage.role, rank) for stage in stages)
    examples = " and ".join(f"{start} to {stop - 1}" for start, stop in intervals)
    lines = [
        f'"""Rank {rank} of {plan.world} of {program.name}: role{"s" if len(part.roles) > 1 else ""} {names}'
        + (f", examples {examples} of {plan.global_batch}" if stages else "")
        + f".  Written by splitc {__version__}; yours to edit.",
        "",
    ]
    lines += _rank_table(program, stages, rank)
    lines += [
        f"sends    {units.nbytes(sent)} a step, {len(ops)} operations on the wire",
        f"run      torchrun --nproc-per-node {plan.world} launch.py",
        "remake   splitc compile <model file> --plan plan.json",
        '"""',
        "",
    ]
    exported = ["EVERY_TURN"] if any(_updates_every_turn(program, stage) for stage in stages) else []
    exported += ["SERVED"] if SERVER in part.roles or any(stage.served for stage in stages) else []
    exported += ["Stage", "evaluate", "step"]
    lines += [
        f"from {part.name} import {', '.join(exported)}",
        "",
        "from splitc.runtime import Rank, RoleComm",
        "",
        f"__all__ = [{', '.join(literal(name) for name in sorted([*exported, 'rank'], key=_sorted_names))}]",
        "",
        f'PLAN = "{plan.hash}"',
        "",
        "rank = Rank(",
    ]
    lines += _fields({"index": (rank, ""), "world": (plan.world, "")}, "    ")
    lines += ["    comms=(", *(line for stage in stages for line in _seat(program, stage, rank))]
    if not stages:
        lines += _server_seat(program, rank)
    lines += ["    ),"]
    lines += _fields(
        {
            "readers": (plan.roles[plan.reader], "ranks that read the data"),
            "bounds": (plan.batch_offsets[plan.reader], "where each reader's examples begin"),
            "inputs": (_inputs(program, stages), "what a reader reads: shape, dtype, and how high whole numbers go"),
        },
        "    ",
    )
    return "\n".join([*lines, ")", ""])


def _sorted_names(name: str) -> tuple[bool, bool, str]:
    """As linters sort `__all__`: constants, classes, the rest."""
    return not name.isupper(), not name[0].isupper(), name


def _updates_every_turn(program: PlacedProgram, stage: Stage) -> bool:
    grouping = program.plan.groups.get(stage.role)
    return grouping is not None and grouping.updates == "every"


def _seat(program: LoweredProgram, stage: Stage, rank: int) -> list[str]:
    plan, role = program.plan, stage.role
    routes = {other: plan.routes(rank, role, other) for other in _partners(stage)}
    fields: dict[str, tuple[object, str]] = {
        "role": (f'"{role}"', ""),
        "examples": (plan.interval(role, rank), "its part of the global batch"),
        "replicas": (plan.replicas(role, rank), "ranks that hold the same parameters and sum their gradients"),
    }
    if routes:
        fields["routes"] = (_routes(routes), "peer, and the examples that both work on")
    if role in plan.groups:
        group = plan.group(role, rank)
        fields["group"] = (group, "ranks that share their examples and its parameters")
        fields["scheme"] = (f'"{plan.groups[role].scheme}"', "which of their examples make a turn")
        if plan.groups[role].updates != "once":
            fields["updates"] = (f'"{plan.groups[role].updates}"', "when the optimizer steps")
        shards = {name: shard_of(program, stage, name, group.index(rank), len(group)) for name in stage.shards}
        fields["shares"] = (_table(shards), "its part of a parameter: dim, first, one past the last")
    if plan.all_reduce != "backend":
        fields["algorithm"] = (f'"{plan.all_reduce}"', "how gradients are summed")
    if SERVER in program.rank_program(rank).roles:
        rows = {name: share for name, share in _rows_served(program, rank, [stage]).items() if share[1] < share[2]}
        fields["serves"] = (_table(rows), "what it holds for all workers: dim, first row, one past the last")
    return ["        RoleComm(", *_fields(fields, "            "), "        ),"]


def _server_seat(program: LoweredProgram, rank: int) -> list[str]:
    served = [stage for stage in program.stages if stage.served]
    workers = {stage.role: program.plan.roles[stage.role] for stage in served}
    rows = _rows_served(program, rank, served)
    fields: dict[str, tuple[object, str]] = {
        "role": (f'"{SERVER}"', ""),
        "replicas": ((rank,), ""),
        "shares": (_table(rows), "its rows of each parameter: dim, first, one past the last"),
        "workers": (_table(workers), "role, and the ranks that it serves"),
    }
    return ["        RoleComm(", *_fields(fields, "            "), "        ),"]


def _rows_served(program: PlacedProgram, rank: int, stages: Sequence[Stage]) -> dict[str, tuple[int, int, int]]:
    """The rows of each served parameter that a server holds, under all its names; some have none.

    Not of scalars: they have no rows, and one server holds them whole.
    """
    servers = program.plan.servers
    found: dict[str, tuple[int, int, int]] = {}
    for stage in stages:
        for bucket in stage.served:
            found.update(dict.fromkeys(bucket, (0, 0, 0)))
            found.update({p.name: (0, p.first, p.last) for p in pieces(program, bucket, servers) if p.server == rank})
    held = (holding for holding in program.tensors.values() if holding.name in found and holding.shape)
    return {name: found[h.name] for h in held for name in dict.fromkeys((h.name, *h.names))}


def served_file(program: LoweredProgram) -> str:
    """Which server has which rows of which parameter; the same for all ranks."""
    plan = program.plan
    lines = [
        f'"""What the servers of {program.name} hold: {ranks_text(plan.servers)} of {plan.world}.  '
        f"Written by splitc {__version__}; yours to edit.",
        '"""',
        "",
        f'PLAN = "{plan.hash}"',
        "",
        "SERVED = {  # role of the workers -> buckets, in the order in which backward fills them",
    ]
    for stage in program.stages:
        if not stage.served:
            continue
        lines.append(f'    "{stage.role}": (')
        for bucket in stage.served:
            size = units.nbytes(sum(program.tensors[name].nbytes for name in bucket))
            lines.append(f"        {{  # {size}; parameter: server, first row, one past the last")
            spread = pieces(program, bucket, plan.servers)
            for name in bucket:
                rows = tuple((p.server, p.first, p.last) for p in spread if p.name == name)
                lines.append(f"            {literal(name)}: {rows},")
            lines.append("        },")
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def _fields(fields: Mapping[str, tuple[object, str]], indent: str) -> list[str]:
    lines = []
    for name, (value, note) in fields.items():
        text = f"{indent}{name}={value},".replace("\n", f"\n{indent}")
        lines.append(
            f"{text:<44}  # {note}" if note and "\n" not in text else f"{indent}# {note}\n{text}" if note else text
        )
    return lines


def _table(rows: Mapping[str, object]) -> str:
    if not rows:
        return "{}"
    return "{\n" + "\n".join(f"    {literal(name)}: {row}," for name, row in rows.items()) + "\n}"


def _routes(routes: Mapping[str, tuple[tuple[int, int, int], ...]]) -> str:
    return "{" + ", ".join(f'"{role}": {peers}' for role, peers in routes.items()) + "}"


def _inputs(program: Program, stages: Sequence[Stage]) -> str:
    specs = {i.name: i for i in program.inputs}
    return _table(
        {
            name: f'({specs[name].spec.template()}, "{str(specs[name].spec.dtype).removeprefix("torch.")}", '
            f"{specs[name].high})"
            for stage in stages
            for name in stage.inputs
        }
    )


def _partners(stage: Stage) -> list[str]:
    found = [c.producer for c in stage.receives if c.passes("send")] + [
        c.consumer for c in stage.sends if c.passes("send")
    ]
    return list(dict.fromkeys(found))


def _rank_table(program: PlacedProgram, stages: Sequence[Stage], rank: int) -> list[str]:
    plan = program.plan
    inputs = {i.name: i.spec for i in program.inputs}
    rows: list[tuple[str, str, TensorSpec, str, int]] = []
    for stage in stages:
        batch = plan.batch(stage.role, rank)

        def peers(role: str, mine: str = stage.role) -> str:
            return ranks_text(tuple(peer for peer, _, _ in plan.routes(rank, mine, role)))

        rows += [("in", name, inputs[name], "", batch) for name in stage.inputs]
        rows += [("in", c.name, c.spec, f"<- {peers(c.producer)}", batch) for c in stage.receives if c.passes("send")]
        rows += [
            (
                "in",
                c.name,
                c.spec,
                f"of its group, {ranks_text(plan.group(stage.role, rank))}",
                plan.peak_batch(stage.role, rank),
            )
            for c in stage.receives
            if c.passes("modulo")
        ]
        rows += [("out", c.name, c.spec, f"-> {peers(c.consumer)}", batch) for c in stage.sends if c.passes("send")]
    width = max((len(name) for _, name, _, _, _ in rows), default=0)
    return [
        f"{kind:<9}{name:<{width}}  {spec.at(batch)!s:<22} {str(spec.dtype).removeprefix('torch.'):<8} {note}".rstrip()
        for kind, name, spec, note, batch in rows
    ]


def idle_rank_file(program: PlacedProgram, rank: int) -> str:
    """A rank that the plan gives no work."""
    plan = program.plan
    return (
        f'"""Rank {rank} of {plan.world} of {program.name}: the plan {plan.strategy} gives it no work.  '
        f'Written by splitc {__version__}; yours to edit."""\n\nfrom idle import Stage, evaluate, step\n\n'
        f'from splitc.runtime import Rank\n\n__all__ = ["Stage", "evaluate", "rank", "step"]\n\n'
        f'PLAN = "{plan.hash}"\n\nrank = Rank(\n    index={rank},\n    world={plan.world},\n'
        f"    readers={plan.roles[plan.reader]},\n    bounds={plan.batch_offsets[plan.reader]},\n"
        f")\n"
    )
