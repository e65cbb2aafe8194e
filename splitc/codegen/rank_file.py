"""Write the file of a rank: its place in the plan, its peers, and its examples of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from splitc import units
from splitc.codegen.layout import Line, docstring, wrapped
from splitc.ir.constructors import literal
from splitc.ir.plan import SERVER, ranks_text
from splitc.ir.program import LoweredProgram, Stage, TensorSpec
from splitc.ir.server_rows import pieces
from splitc.ir.wire import shard_of, wire
from splitc.version import __version__

IDLE = "idle"
"""The role of ranks that a plan gives no work."""

_ITEM = "    "


def rank_file(program: LoweredProgram, rank: int) -> str:
    """The file `rankN.py`."""
    plan, rank_program = program.plan, program.rank_program(rank)
    stages = [program.stage(role) for role in rank_program.roles if role != SERVER]
    every = [stage for stage in stages if updates_every_microbatch(program, stage)]
    roles = [line for stage in stages for line in _role(program, stage, rank)] or _server_role(program, rank)
    fields: list[Line] = [
        (_call("roles=", "(", roles, ")"), ""),
        *_reader_fields(program),
    ]
    if any(stage.inputs for stage in stages):
        fields.append((f"inputs={_inputs(program, stages)}", "what a reader reads"))
    if is_served := SERVER in rank_program.roles or any(stage.served for stage in stages):
        fields.append(("served=SERVED", "the parameters that servers hold"))
    imports = [*(["EVERY_MICROBATCH"] if every else []), "Stage", "evaluate", "step"]
    return _file(
        docstring(_title(program, stages, rank), _summary(program, stages, rank)),
        [
            *(["from served import SERVED"] if is_served else []),
            f"from {rank_program.name} import {', '.join(imports)}",
        ],
        plan.hash,
        _call("rank = RankSpec", "(", [f"index={rank},", f"world={plan.world},", *_fields(fields)], ")").split("\n"),
    )


def idle_rank_file(program: LoweredProgram, rank: int) -> str:
    """The file of a rank that the plan gives no work."""
    plan = program.plan
    title = f"Rank {rank} of {plan.world} of {program.name}: the plan {plan.strategy} gives it no work."
    role = f'roles=(RoleSpec(role="{IDLE}", replicas=({rank},)),),'
    fields = [f"index={rank},", f"world={plan.world},", role, *_fields(_reader_fields(program))]
    return _file(
        docstring(f"{title}  Written by splitc {__version__}; yours to edit.", []),
        [f"from {IDLE} import Stage, evaluate, step"],
        plan.hash,
        _call("rank = RankSpec", "(", fields, ")").split("\n"),
    )


def served_file(program: LoweredProgram) -> str:
    """The file that says which server holds which rows of which parameter; the same for all ranks."""
    plan = program.plan
    title = f"The parameters that the servers of {program.name} hold: {ranks_text(plan.servers)} of {plan.world}."
    lines = [
        *docstring(f"{title}  Written by splitc {__version__}; yours to edit.", []),
        *("", "from splitc.runtime import Rows", "", f'PLAN = "{plan.hash}"', ""),
        "SERVED = {  # role of the workers -> buckets, in the order in which backward fills them",
    ]
    for stage in program.stages:
        if not stage.served:
            continue
        lines.append(f'    "{stage.role}": (')
        for bucket in stage.served:
            lines.append(f"        {{  # {units.nbytes(sum(program.tensors[name].nbytes for name in bucket))}")
            spread = pieces(program, bucket, plan.servers)
            for name in bucket:
                rows = [f"Rows(server={p.server}, first={p.first}, last={p.last})," for p in spread if p.name == name]
                lines += _indented(wrapped(f"{literal(name)}: ({_tuple(rows)}),", 108), 3)
            lines.append("        },")
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def updates_every_microbatch(program: LoweredProgram, stage: Stage) -> bool:
    """Whether the optimizer updates the stage's parameters after every microbatch, not once a step."""
    grouping = program.plan.groups.get(stage.role)
    return grouping is not None and grouping.updates == "every"


# -- the docstring -----------------------------------------------------------------------------------------------------


def _title(program: LoweredProgram, stages: Sequence[Stage], rank: int) -> str:
    plan, roles = program.plan, program.rank_program(rank).roles
    names = " and ".join(f'"{role}"' for role in roles)
    intervals = dict.fromkeys(plan.interval(stage.role, rank) for stage in stages)
    examples = " and ".join(f"{start} to {stop - 1}" for start, stop in intervals)
    return (
        f"Rank {rank} of {plan.world} of {program.name}: role{'s' if len(roles) > 1 else ''} {names}"
        f"{f', examples {examples} of {plan.global_batch}' if stages else ''}.  "
        f"Written by splitc {__version__}; yours to edit."
    )


def _summary(program: LoweredProgram, stages: Sequence[Stage], rank: int) -> list[str]:
    """What the rank exchanges, and how to run it."""
    ops = wire(program, rank)
    return [
        *_exchanged(program, stages, rank),
        f"sends    {units.nbytes(sum(op.sent for op in ops))} a step, {len(ops)} operations on the wire",
        f"run      torchrun --nproc-per-node {program.plan.world} launch.py",
        "remake   splitc compile <model file> --plan plan.json",
    ]


def _exchanged(program: LoweredProgram, stages: Sequence[Stage], rank: int) -> list[str]:
    """A line for each tensor that comes in or goes out, with its shape and the peers."""
    plan = program.plan
    inputs = {i.name: i.spec for i in program.inputs}
    rows: list[tuple[str, str, TensorSpec, str, int]] = []
    for stage in stages:
        role, batch = stage.role, plan.batch(stage.role, rank)
        peak, group = plan.peak_batch(role, rank), ranks_text(plan.group(role, rank))
        peers = {
            other: ranks_text(tuple(peer for peer, _, _ in plan.routes(rank, role, other))) for other in plan.roles
        }
        rows += [("in", name, inputs[name], "", batch) for name in stage.inputs]
        rows += [("in", c.name, c.spec, f"<- {peers[c.producer]}", batch) for c in stage.receives if c.passes("send")]
        rows += [("in", c.name, c.spec, f"of its group, {group}", peak) for c in stage.receives if c.passes("modulo")]
        rows += [("out", c.name, c.spec, f"-> {peers[c.consumer]}", batch) for c in stage.sends if c.passes("send")]
    width = max((len(name) for _, name, _, _, _ in rows), default=0)
    return [
        f"{kind:<9}{name:<{width}}  {spec.at(batch)!s:<22} {str(spec.dtype).removeprefix('torch.'):<8} {note}".rstrip()
        for kind, name, spec, note, batch in rows
    ]


# -- the description ---------------------------------------------------------------------------------------------------


def _role(program: LoweredProgram, stage: Stage, rank: int) -> list[str]:
    plan, role = program.plan, stage.role
    fields: list[Line] = [
        (f'role="{role}"', ""),
        (f"examples={plan.interval(role, rank)}", "this rank's examples of the global batch"),
        (f"replicas={plan.replicas(role, rank)}", "ranks that hold the same parameters and sum their gradients"),
    ]
    if routes := {other: plan.routes(rank, role, other) for other in _partners(stage)}:
        fields.append((f"routes={_routes(routes)}", "ranks of other roles, and the examples exchanged with each"))
    if role in plan.groups:
        fields += _group_fields(program, stage, rank)
    if plan.all_reduce != "backend":
        fields.append((f'all_reduce="{plan.all_reduce}"', "how gradients are summed"))
    if SERVER in program.rank_program(rank).roles:
        rows = {name: (first, last) for name, (first, last) in _served_rows(program, rank, [stage]).items()}
        held = {name: _shard((0, first, last)) for name, (first, last) in rows.items() if first < last}
        fields.append((f"served_rows={_table(held)}", "the rows that this rank serves to all workers"))
    return _call("RoleSpec", "(", _fields(fields), "),").split("\n")


def _group_fields(program: LoweredProgram, stage: Stage, rank: int) -> list[Line]:
    grouping, group = program.plan.groups[stage.role], program.plan.group(stage.role, rank)
    member, size = group.index(rank), len(group)
    found = ((name, shard_of(program, stage, name, member, size)) for name in stage.shards)
    shards = {name: _shard(shard) for name, shard in found if shard is not None}
    fields: list[Line] = [
        (f"group={group}", "ranks that share the parameters and compute each other's examples"),
        (f'scheme="{grouping.scheme}"', SCHEMES[grouping.scheme]),
    ]
    if grouping.updates == "every":
        every = f'updated_every_microbatch=EVERY_MICROBATCH["{stage.role}"]'
        fields.append((every, "the optimizer steps in every microbatch"))
    return [*fields, (f"shards={_table(shards)}", "this rank's part of each sharded parameter")]


SCHEMES = {
    "BK": "one microbatch: all examples of the group",
    "B": "a microbatch is the examples of one rank of the group",
    "B/K": "a microbatch is an equal part of every rank's examples",
}
"""What Krizhevsky's names for the schemes mean."""


def _server_role(program: LoweredProgram, rank: int) -> list[str]:
    served = [stage for stage in program.stages if stage.served]
    rows = {name: _shard((0, *bounds)) for name, bounds in _served_rows(program, rank, served).items()}
    workers = {stage.role: str(program.plan.roles[stage.role]) for stage in served}
    fields: list[Line] = [
        (f'role="{SERVER}"', ""),
        (f"replicas=({rank},)", ""),
        (f"shards={_table(rows)}", "this server's rows of each parameter"),
        (f"workers={_table(workers)}", "the ranks that it serves, by role"),
    ]
    return _call("RoleSpec", "(", _fields(fields), "),").split("\n")


def _served_rows(program: LoweredProgram, rank: int, stages: Sequence[Stage]) -> dict[str, tuple[int, int]]:
    """(first, one past the last) of the rows of each served parameter that a server holds, under all its names.

    Some are empty.  Scalars are left out: they have no rows, and one server holds them whole.
    """
    servers = program.plan.servers
    found: dict[str, tuple[int, int]] = {}
    for stage in stages:
        for bucket in stage.served:
            found.update(dict.fromkeys(bucket, (0, 0)))
            found.update({p.name: (p.first, p.last) for p in pieces(program, bucket, servers) if p.server == rank})
    tensors = (tensor for tensor in program.tensors.values() if tensor.name in found and tensor.shape)
    return {name: found[t.name] for t in tensors for name in dict.fromkeys((t.name, *t.names))}


def _partners(stage: Stage) -> list[str]:
    """The other roles that a stage exchanges cuts with."""
    found = [c.producer for c in stage.receives if c.passes("send")]
    found += [c.consumer for c in stage.sends if c.passes("send")]
    return list(dict.fromkeys(found))


def _reader_fields(program: LoweredProgram) -> list[Line]:
    plan = program.plan
    return [
        (f"readers={plan.roles[plan.reader]}", "ranks that read the data"),
        (f"batch_offsets={plan.batch_offsets[plan.reader]}", "where each reader's examples begin, and the end"),
    ]


def _inputs(program: LoweredProgram, stages: Sequence[Stage]) -> str:
    inputs = {i.name: i for i in program.inputs}
    rows = {}
    for name in (name for stage in stages for name in stage.inputs):
        spec, high = inputs[name].spec, inputs[name].high
        bound = "" if high is None else f", high={high}"
        rows[name] = f'Input({spec.template()}, "{str(spec.dtype).removeprefix("torch.")}"{bound})'
    return _table(rows)


# -- text --------------------------------------------------------------------------------------------------------------


def _file(head: list[str], modules: list[str], plan: str, body: list[str]) -> str:
    """A file with the imports that its body needs."""
    names = [n for n in ("Input", "RankSpec", "RoleSpec", "Route", "Shard") if any(f"{n}(" in line for line in body)]
    return "\n".join(
        [
            *(*head, "", *sorted(modules), "", f"from splitc.runtime import {', '.join(names)}", ""),
            *('__all__ = ["Stage", "evaluate", "rank", "step"]', "", f'PLAN = "{plan}"', "", *body, ""),
        ]
    )


def _fields(fields: Sequence[Line]) -> list[str]:
    """Arguments of a call, one a line; the comment of one that takes several lines stands above it."""
    lines: list[str] = []
    for text, note in fields:
        rows = text.split("\n") if "\n" in text else wrapped(text, 60)
        rows[-1] += ","
        if note and len(rows) > 1:
            lines += [f"# {note}", *rows]
        else:
            lines += [f"{rows[0]:<32}  # {note}" if note else rows[0], *rows[1:]]
    return lines


def _call(name: str, opening: str, lines: Iterable[str], closing: str) -> str:
    return "\n".join([name + opening, *(f"{_ITEM}{line}" for line in lines), closing])


def _table(rows: Mapping[str, str]) -> str:
    """A dict, one key a line."""
    if not rows:
        return "{}"
    return _call("", "{", (f"{literal(name)}: {row}," for name, row in rows.items()), "}")


def _routes(routes: Mapping[str, Sequence[tuple[int, int, int]]]) -> str:
    lines = []
    for role, peers in routes.items():
        found = [f"Route(peer={peer}, first={first}, last={last})," for peer, first, last in peers]
        lines += wrapped(f"{literal(role)}: ({_tuple(found)}),", 100)
    return _call("", "{", lines, "}")


def _shard(bounds: tuple[int, int, int]) -> str:
    dim, first, last = bounds
    return f"Shard(dim={dim}, first={first}, last={last})"


def _tuple(items: Sequence[str]) -> str:
    """The inside of a tuple, of items with their commas."""
    return " ".join(items) if len(items) == 1 else " ".join(items).removesuffix(",")


def _indented(lines: Iterable[str], levels: int) -> list[str]:
    return [f"{_ITEM * levels}{line}" for line in lines]
