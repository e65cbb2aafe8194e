"""Write the file of a rank: its place in the plan, its peers, and its examples of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from splitc import units
from splitc.codegen.cut_lines import in_state
from splitc.codegen.layout import docstring, wrapped
from splitc.codegen.rank_spec import IDLE, rank_spec, served_buckets
from splitc.codegen.stage import uses
from splitc.ir.constructors import literal
from splitc.ir.plan import SERVER
from splitc.ir.program import LoweredProgram, Stage, TensorSpec
from splitc.ir.roles import ranks_text
from splitc.ir.rounds import rounds_text
from splitc.ir.wire import wire
from splitc.runtime.collectives.layouts import State
from splitc.runtime.spec import RankSpec

_NOTES = {
    "examples": "this rank's examples of the global batch: first, one past the last",
    "replicas": "ranks that hold the same parameters and sum their gradients",
    "routes": "ranks of other roles, and the examples exchanged with each",
    "group_routes": "the same, of values that one of both roles has for its whole group",
    "group": "ranks that share the parameters and compute each other's examples",
    "microbatches": "parts of every reader's examples, which go through the ranks one after another",
    "updated_every_microbatch": "the optimizer steps in every microbatch",
    "shards": "this rank's part of each parameter",
    "all_reduce": "how gradients are summed",
    "served_rows": "the rows that this rank serves to all workers",
    "workers": "the ranks that it serves, by role",
    "readers": "ranks that read the data",
    "accumulate": "batches to an update",
    "batch_offsets": "where each reader's examples begin, and the end",
    "inputs": "what a reader reads",
    "served": "the parameters that servers hold",
    "guards": "batch sizes for which the traced branches hold",
    "no_evaluation": "why worker.evaluate is refused",
    "ranks": "all ranks of the role",
    "own_sums": "parameters used on a rank's own examples: their gradients are summed over all of the role",
    "unit": "ranks that train together between averages",
    "averaged": "ranks of all units that average the same parameters",
    "rounds": "of local updates",
    "evaluated": "in evaluation the ranks are one group, which holds the whole model",
    "predicts": "the inputs that worker.predict takes",
    "no_outputs": "why worker.predict is refused",
    "reader": "as one of the readers, to which the model's output comes",
    "scales_loss": "backward begins with the loss times the scale of float16",
    "recomputed": "statistics that evaluation computes of a sample of batches",
}
"""The comments of a description's fields."""

_SCHEMES = {
    "BK": "one microbatch: all examples of the group",
    "B": "a microbatch is the examples of one rank of the group",
    "B/K": "a microbatch is an equal part of every rank's examples",
}
"""What Krizhevsky's names for the schemes mean."""


def rank_file(program: LoweredProgram, rank: int) -> str:
    """The file `rankN.py`."""
    spec, rank_program = rank_spec(program, rank), program.rank_program(rank)
    stages = [program.stage(role) for role in rank_program.roles if role != SERVER]
    every = ["EVERY_MICROBATCH"] if any(role.updated_every_microbatch for role in spec.roles) else []
    modules = [f"from {rank_program.name} import {', '.join([*every, 'Stage', *_functions(spec)])}"]
    modules += ["from served import SERVED"] if spec.served else []
    return _file(docstring(_title(program, stages, rank), _summary(program, stages, rank)), modules, program, spec)


def idle_rank_file(program: LoweredProgram, rank: int) -> str:
    """The file of a rank that the plan gives no work."""
    title = f"Rank {rank} of {program.plan.world} of {program.name}: the plan {program.plan.strategy} gives it no work."
    return _file(
        docstring(title), [f"from {IDLE} import Stage, evaluate, predict, step"], program, rank_spec(program, rank)
    )


def served_file(program: LoweredProgram) -> str:
    """The file that says which server holds which rows of which parameter; the same for all ranks."""
    plan = program.plan
    title = f"The parameters that the servers of {program.name} hold: {ranks_text(plan.servers)} of {plan.world}."
    lines = [
        *docstring(title),
        *("", "from splitc.runtime import Rows", "", f'PLAN = "{plan.hash}"', ""),
        "SERVED = {  # role of the workers -> buckets, in the order in which backward fills them",
    ]
    for role, buckets in served_buckets(program).items():
        lines.append(f'    "{role}": (')
        for bucket in buckets:
            lines.append(f"        {{  # {units.nbytes(sum(program.tensors[name].nbytes for name in bucket))}")
            rows = [line for name, rows in bucket.items() for line in _ended(_value(rows, f"{literal(name)}: "))]
            lines += [f"            {line}" for line in rows]
            lines.append("        },")
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])


# -- the docstring -----------------------------------------------------------------------------------------------------


def _title(program: LoweredProgram, stages: Sequence[Stage], rank: int) -> str:
    plan, roles = program.plan, program.rank_program(rank).roles
    names = " and ".join(f'"{role}"' for role in roles)
    intervals = dict.fromkeys(plan.interval(stage.role, rank) for stage in stages)
    examples = " and ".join(f"{start} to {stop - 1}" for start, stop in intervals)
    return (
        f"Rank {rank} of {plan.world} of {program.name}: role{'s' if len(roles) > 1 else ''} {names}"
        f"{f', examples {examples} of {plan.global_batch}' if stages else ''}."
    )


def _summary(program: LoweredProgram, stages: Sequence[Stage], rank: int) -> list[str]:
    """What the rank exchanges, and how to run it."""
    ops, rounds, batches = wire(program, rank), rounds_text(program.plan), program.plan.accumulate
    mean = ", as the mean over a round" if rounds else f", as the mean of {batches}" if batches > 1 else ""
    sent = f"{units.nbytes(sum(op.per_step for op in ops))} a step{mean}"
    return [
        *_exchanged(program, stages, rank),
        *([f"trains   approximately: {rounds}"] if rounds else []),
        *([f"updates  after {batches} batches"] if batches > 1 else []),
        f"sends    {sent}, {len(ops)} operations on the wire",
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
            c: ranks_text(tuple(peer for peer, *_ in plan.routes(rank, role, c.other(role), c.together())))
            + in_state(c.arrives)
            for c in (*stage.receives, *stage.sends)
        }
        rows += [("in", name, inputs[name], "", batch) for name in stage.inputs]
        for c in (c for c in stage.receives if c.sent):
            rows.append(("in", c.name, c.spec, f"<- {peers[c]}", batch if c.arrives is State.BATCH else peak))
        rows += [("in", c.name, c.spec, f"of its group, {group}", peak) for c in stage.receives if c.gathered]
        rows += [("out", c.name, c.spec, f"-> {peers[c]}", batch) for c in stage.sends if c.sent]
    width = max((len(name) for _, name, _, _, _ in rows), default=0)
    return [
        f"{kind:<9}{name:<{width}}  {spec.at(batch)!s:<22} {str(spec.dtype).removeprefix('torch.'):<8} {note}".rstrip()
        for kind, name, spec, note, batch in rows
    ]


# -- the description ---------------------------------------------------------------------------------------------------


def _file(head: list[str], modules: list[str], program: LoweredProgram, spec: RankSpec) -> str:
    """A file with the imports that its description needs."""
    body = [*_value(spec, "rank = ")]
    known = ("BatchGuard", "Input", "RankSpec", "RoleSpec", "Rounds", "Route", "Shard")
    names = [name for name in known if uses(body, f"{name}(")]
    lines = [*head, "", *sorted(modules), "", f"from splitc.runtime import {', '.join(names)}", ""]
    exported = sorted({"Stage", "rank", *_functions(spec)})
    lines += [f"__all__ = [{', '.join(map(literal, exported))}]", "", f'PLAN = "{program.plan.hash}"', "", *body, ""]
    return "\n".join(lines)


def _functions(spec: RankSpec) -> tuple[str, ...]:
    """The functions of a role's file that the worker calls."""
    turns = ("after_update",) if spec.rounds and spec.rounds.in_turns else ()
    return (*turns, *(("begin_round", "end_round") if spec.rounds else ()), "evaluate", "predict", "step")


def _value(value: Any, before: str = "") -> list[str]:
    """A value of a description as source, after the text `before`; long ones take several lines."""
    if is_dataclass(value):
        return [f"{before}{type(value).__name__}(", *(f"    {line}" for line in _fields(value)), ")"]
    if isinstance(value, dict):
        items = [line for key, each in value.items() for line in _ended(_value(each, f"{literal(key)}: "))]
        return [f"{before}{{", *(f"    {line}" for line in items), "}"]
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [f"{before}(", *(f"    {line}" for each in value for line in _ended(_value(each))), ")"]
    return wrapped(f"{before}{_inline(value)}", 100)


def _inline(value: Any) -> str:
    """A value on one line; named tuples with the names of their fields."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        return f"{type(value).__name__}({', '.join(f'{k}={_inline(v)}' for k, v in pairs if v is not None)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_inline, value))}{',' if len(value) == 1 else ''})"
    return literal(value)


def _fields(spec: Any) -> list[str]:
    """The arguments that construct a description, without defaults; the comment of a long one stands above it."""
    lines: list[str] = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        if value == (field.default if field.default_factory is MISSING else field.default_factory()):
            continue
        note = _SCHEMES[value] if field.name == "scheme" else _NOTES.get(field.name, "")
        match field.name:
            case "served":
                text = ["served=SERVED"]
            case "updated_every_microbatch":
                text = [f'updated_every_microbatch=EVERY_MICROBATCH["{spec.role}"]']
            case name:
                text = _value(value, f"{name}=")
        if note and len(text) > 1:
            lines.append(f"# {note}")
        elif note:
            text = [f"{text[0]},".ljust(32) + f"  # {note}"]
        lines += text if note and len(text) == 1 else _ended(text)
    return lines


def _ended(lines: list[str]) -> list[str]:
    return [*lines[:-1], f"{lines[-1]},"]
