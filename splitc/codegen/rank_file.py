"""Write the file of a rank: its place in the plan, its peers, and its examples of the batch."""

from __future__ import annotations

from collections.abc import Sequence

from splitc import runtime, units
from splitc.codegen.cut_lines import in_state
from splitc.codegen.descriptions import source
from splitc.codegen.features import constant_imports, features
from splitc.codegen.layout import docstring
from splitc.codegen.rank_spec import IDLE, rank_spec
from splitc.codegen.stage import uses
from splitc.ir.constructors import literal
from splitc.ir.features import approximation
from splitc.ir.program import LoweredProgram, Stage, TensorSpec
from splitc.ir.roles import ranks_text
from splitc.ir.short_wire import wire_text
from splitc.ir.wire import wire
from splitc.runtime.collectives.layouts import State
from splitc.runtime.spec import RankSpec


def rank_file(program: LoweredProgram, rank: int) -> str:
    """The file `rankN.py`."""
    spec, rank_program = rank_spec(program, rank), program.rank_program(rank)
    stages = program.stages_of(rank_program)
    every = ["EVERY_MICROBATCH"] if any(role.updated_every_microbatch for role in spec.roles) else []
    modules = [f"from {rank_program.name} import {', '.join([*every, 'Stage', *_functions(spec)])}"]
    return _file(docstring(_title(program, stages, rank), _summary(program, stages, rank)), modules, program, spec)


def idle_rank_file(program: LoweredProgram, rank: int) -> str:
    """The file of a rank that the plan gives no work."""
    title = f"Rank {rank} of {program.plan.world} of {program.name}: the plan {program.plan.strategy} gives it no work."
    return _file(
        docstring(title), [f"from {IDLE} import Stage, evaluate, predict, step"], program, rank_spec(program, rank)
    )


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
    ops, how, batches = wire(program, rank), approximation(program.plan), program.plan.accumulate
    mean = f", as the mean over a {program.plan.cycle}" if how else f", as the mean of {batches}" if batches > 1 else ""
    sent = f"{units.nbytes(sum(op.per_step for op in ops))} a step{mean}"
    return [
        *_exchanged(program, stages, rank),
        *([f"trains   approximately: {how}"] if how else []),
        *([f"wire     approximate: {short}"] if (short := wire_text(program.plan.wire)) else []),
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
        cuts = (*stage.receives, *stage.sends)
        routes = {c: plan.routes(rank, role, c.other(role), c.together()) for c in cuts}
        peers = {c: ranks_text(tuple(peer for peer, *_ in routes[c])) + in_state(c.arrives) for c in cuts}
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
    body = source(spec, "rank = ")
    names = ", ".join(name for name in runtime.__all__ if uses(body, f"{name}("))
    imports = [*sorted([*modules, *constant_imports(body)]), "", f"from splitc.runtime import {names}"]
    exported = ", ".join(map(literal, sorted({"Stage", "rank", *_functions(spec)})))
    sections = head, imports, [f"__all__ = [{exported}]"], [f'PLAN = "{program.plan.hash}"'], [*body, ""]
    return "\n\n".join(map("\n".join, sections))


def _functions(spec: RankSpec) -> tuple[str, ...]:
    """The functions of a role's file that the worker calls."""
    own = (name for feature in features() for name in feature.functions(spec))
    return (*own, "evaluate", "predict", "step")
