"""The lines that exchange parameters with servers, and the file that says which server holds what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import fx

from splitc import units
from splitc.codegen.descriptions import ended, source
from splitc.codegen.features import Feature, Writer
from splitc.codegen.layout import Line, docstring
from splitc.codegen.stage_names import buckets_text
from splitc.ir.constructors import literal
from splitc.ir.plan import SERVER
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.roles import ranks_text
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.servers.feature import served_names
from splitc.ir.servers.wire import pieces
from splitc.runtime.spec import RankSpec, RoleSpec, Rows, Served, Shard


class Servers(Feature):
    """Pulls before the forward, pushes around the backward, and ranks that only serve."""

    notes: ClassVar = {
        "served_rows": "the rows that this rank serves to all workers",
        "workers": "the ranks that it serves, by role",
        "served": "the parameters that servers hold",
    }
    constants: ClassVar = {"served": ("SERVED", "served")}
    docs: ClassVar = {
        "step": "Send parameters to the workers and leave the sum of their gradients in `.grad`.",
        "evaluate": "Send parameters to the workers, which compute the loss of one batch.",
        "predict": "Send parameters to the workers, which compute the model's output.",
    }

    def files(self, program: LoweredProgram) -> dict[str, str]:
        return {"served.py": _served_file(program)} if program.plan.servers else {}

    def held(self, program: LoweredProgram, rank: int) -> Iterable[str]:
        return served_names(program) if rank in program.plan.servers else ()

    def stage(self, program: LoweredProgram, rank_program: RankProgram) -> Stage | None:
        """The parameters of all workers' layers that servers serve."""
        graph, served = fx.Graph(), served_names(program)
        graph.output(None)
        return Stage(SERVER, graph, (), (), (), (), tuple(name for name in program.tensors if name in served))

    def of_rank(self, program: LoweredProgram, spec: RankSpec) -> RankSpec:
        rank, plan, roles = spec.index, program.plan, spec.roles
        own = [program.stage(role) for role in plan.roles_of(rank)]
        if rank in plan.servers and own:
            rows = [_served_rows(program, rank, [stage]) for stage in own]
            kept = [{name: each for name, each in served.items() if each.first < each.last} for served in rows]
            roles = tuple(replace(role, served_rows=each) for role, each in zip(roles, kept, strict=True))
        elif rank in plan.servers:
            served = [stage for stage in program.stages if stage.served]
            workers = {stage.role: plan.roles[stage.role] for stage in served}
            shards = _served_rows(program, rank, served)
            roles = (RoleSpec(SERVER, replicas=(rank,), shards=shards, workers=workers),)
        knows = rank in plan.servers or any(stage.served for stage in own)
        return replace(spec, roles=roles, served=_served(program)) if knows else spec

    def lines(self, writer: Writer, action: Action, comm: str) -> list[Line] | None:
        if action.verb != "pull":
            return None
        buckets = f'stage, SERVED["{action.role}"]'
        if writer.program.plan.overlap:
            return [(f"{comm}.start_pulls({buckets})", "parameters begin to arrive")]
        return [(f"{comm}.pull_all({buckets})", "parameters arrive")]

    def around_backward(self, program: LoweredProgram, stage: Stage, comm: str) -> tuple[list[Line], list[Line]]:
        if not stage.served:
            return [], []
        buckets, note = f'stage, SERVED["{stage.role}"]', buckets_text(program, stage, stage.served)
        if program.plan.overlap:
            return [(f"{comm}.push({buckets})", f"{note}, during backward")], []
        return [], [(f"{comm}.push_all({buckets})", note)]

    def where(self, stages: Iterable[Stage]) -> str:
        return "go to the servers" if any(stage.served for stage in stages) else ""


FEATURE = Servers()


def _served(program: LoweredProgram) -> Served:
    """The servers' rows of every served parameter; the same for all ranks."""

    def rows(bucket: Sequence[str]) -> dict[str, tuple[Rows, ...]]:
        spread = pieces(program, bucket, program.plan.servers)
        return {n: tuple(Rows(p.server, p.first, p.last) for p in spread if p.name == n) for n in bucket}

    return {stage.role: tuple(map(rows, stage.served)) for stage in program.stages if stage.served}


def _served_rows(program: LoweredProgram, rank: int, stages: Sequence[Stage]) -> dict[str, Shard]:
    """The rows of each served parameter that a server holds, under all its names; some are empty.

    Scalars are left out: they have no rows, and one server holds them whole.
    """
    found: dict[str, Shard] = {}
    for bucket in (bucket for stage in stages for bucket in stage.served):
        found.update(dict.fromkeys(bucket, Shard(0, 0, 0)))
        spread = pieces(program, bucket, program.plan.servers)
        found.update({p.name: Shard(0, p.first, p.last) for p in spread if p.server == rank})
    tensors = (tensor for tensor in program.tensors.values() if tensor.name in found and tensor.shape)
    return {name: found[t.name] for t in tensors for name in t.all_names}


def _served_file(program: LoweredProgram) -> str:
    """The file that says which server holds which rows of which parameter; the same for all ranks."""
    plan = program.plan
    title = f"The parameters that the servers of {program.name} hold: {ranks_text(plan.servers)} of {plan.world}."
    lines = [
        *docstring(title),
        *("", "from splitc.runtime import Rows", "", f'PLAN = "{plan.hash}"', ""),
        "SERVED = {  # role of the workers -> buckets, in the order in which backward fills them",
    ]
    for role, buckets in _served(program).items():
        lines.append(f'    "{role}": (')
        for bucket in buckets:
            size = units.nbytes(sum(program.tensors[name].nbytes for name in bucket))
            rows = [line for name, rows in bucket.items() for line in ended(source(rows, f"{literal(name)}: "))]
            lines += [f"        {{  # {size}", *(f"            {line}" for line in rows), "        },"]
        lines.append("    ),")
    return "\n".join([*lines, "}", ""])
