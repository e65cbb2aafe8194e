"""Describe a rank of a lowered program as the runtime takes it: its roles, its peers, and the data it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.codegen.stage_names import receiving
from splitc.ir.plan import SERVER
from splitc.ir.program import LoweredProgram, Refusal, Stage
from splitc.ir.server_wire import pieces
from splitc.ir.wire import shard_of
from splitc.runtime.spec import Input, RankSpec, RoleSpec, Route, Rows, Served, Shard

IDLE = "idle"
"""The role of ranks that a plan gives no work."""


def rank_spec(program: LoweredProgram, rank: int) -> RankSpec:
    """Describe a rank; one that has no rank program is idle."""
    plan = program.plan
    roles = plan.duties(rank)
    stages = [program.stage(role) for role in roles if role != SERVER]
    described = [_role(program, stage, rank, is_server=SERVER in roles) for stage in stages]
    if not stages:
        described = [_server(program, rank) if roles else RoleSpec(IDLE, replicas=(rank,))]
    names = [name for stage in stages for name in stage.inputs]
    inputs = [i for name in names for i in program.inputs if i.name == name]
    return RankSpec(
        rank,
        plan.world,
        tuple(described),
        plan.roles[plan.reader],
        plan.batch_offsets[plan.reader],
        {
            i.name: Input(i.loose or i.spec.template(), str(i.spec.dtype).removeprefix("torch."), i.high, i.path)
            for i in inputs
        },
        served_buckets(program) if SERVER in roles or any(stage.served for stage in stages) else {},
        program.guards,
        program.evaluated.why if isinstance(program.evaluated, Refusal) else "",
        plan.rounds,
        tuple(_evaluated(program, stage, rank) for stage in stages) if plan.deals else (),
        tuple(name for stage in stages for name in _recomputed(program, stage)) if plan.deals else (),
        plan.accumulate,
        *_predicting(program, rank),
        program.autocast == torch.float16,
    )


def _predicting(program: LoweredProgram, rank: int) -> tuple[tuple[str, ...], str, RoleSpec | None]:
    """The inputs that a rank gives to `predict`, why there is none, and its communicator as one that reads data."""
    if isinstance(outputs := program.predicted, Refusal):
        return (), outputs.why, None
    stages = [outputs.stage(role) for role in outputs.plan.roles_of(rank)]
    inputs = tuple(name for stage in stages for name in stage.inputs)
    for stage in (stage for stage in stages if stage.role in receiving(outputs)):
        return inputs, "", replace(_role(outputs, stage, rank, is_server=False), replicas=(rank,))
    return inputs, "", None


def served_buckets(program: LoweredProgram) -> Served:
    """The servers' rows of every served parameter; the same for all ranks."""

    def rows(bucket: Sequence[str]) -> dict[str, tuple[Rows, ...]]:
        spread = pieces(program, bucket, program.plan.servers)
        return {n: tuple(Rows(p.server, p.first, p.last) for p in spread if p.name == n) for n in bucket}

    return {stage.role: tuple(map(rows, stage.served)) for stage in program.stages if stage.served}


def trained_every_microbatch(program: LoweredProgram, stage: Stage) -> tuple[str, ...]:
    """The parameters of a stage that the optimizer updates after every microbatch, not once a step."""
    if program.plan.grouping(stage.role).updates == "once":
        return ()
    return tuple(name for name in stage.tensors if program.tensors[name].trainable)


def _role(program: LoweredProgram, stage: Stage, rank: int, is_server: bool) -> RoleSpec:
    plan, role = program.plan, stage.role
    group = plan.group(role, rank) if role in plan.groups else ()
    beside = [each for each in (program.evaluated, program.predicted) if not isinstance(each, Refusal)]
    stages = [stage, *(each for other in beside for each in other.stages if each.role == role)]
    cuts = [c for each in stages for c in (*each.receives, *each.sends) if c.sent]
    together = {c.other(role): c.consumer for c in cuts if c.together()}
    owners = plan.owners(role, rank)
    named = ((name, each) for name in stage.shards for each in dict.fromkeys((name, *program.tensors[name].names)))
    shards = ((each, shard_of(program, stage, name, owners.index(rank), len(owners))) for name, each in named)
    served = _served_rows(program, rank, [stage]) if is_server else {}
    return RoleSpec(
        role,
        plan.interval(role, rank),
        plan.replicas(role, rank),
        {
            other: tuple(
                Route(*route) for route in (plan if other in plan.roles else beside[-1].plan).routes(rank, role, other)
            )
            for other in dict.fromkeys(c.other(role) for c in cuts)
        },
        group,
        plan.groups[role].scheme if group else "BK",
        plan.microbatches,
        trained_every_microbatch(program, stage),
        {name: Shard(*shard) for name, shard in shards if shard is not None},
        plan.all_reduce,
        {name: rows for name, rows in served.items() if rows.first < rows.last},
        unit=plan.unit(rank) if plan.rounds else (),
        averaged=plan.averaged(role, rank) if plan.rounds else (),
        through_server=plan.rounds is not None and plan.rounds.through == "server",
        group_routes={
            other: tuple(Route(*route) for route in plan.routes(rank, role, other, grouped))
            for other, grouped in together.items()
        },
        ranks=plan.together(role, rank) if any(node.kwargs.get("own") for node in stage.graph.nodes) else (),
        own_sums=stage.own_sums,
    )


def _evaluated(program: LoweredProgram, stage: Stage, rank: int) -> RoleSpec:
    """What a rank does in a role when the whole model is evaluated, by another plan than that of training."""
    assert isinstance(program.evaluated, LoweredProgram)
    evaluation = replace(program.evaluated, outputs=program.outputs)
    return replace(_role(evaluation, evaluation.stage(stage.role), rank, is_server=False), shards={})


def _recomputed(program: LoweredProgram, stage: Stage) -> list[str]:
    """The normalisations of a role with subnets, whose statistics training does not know: those of all neurons."""
    paths = [str(node.target) for node in stage.graph.nodes if node.op == "call_module" and stage.dealt]
    modules = [(path, program.root.get_submodule(path)) for path in paths]
    return [path for path, module in modules if isinstance(module, _BatchNorm) and module.running_mean is not None]


def _server(program: LoweredProgram, rank: int) -> RoleSpec:
    served = [stage for stage in program.stages if stage.served]
    workers = {stage.role: program.plan.roles[stage.role] for stage in served}
    return RoleSpec(SERVER, replicas=(rank,), shards=_served_rows(program, rank, served), workers=workers)


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
    return {name: found[t.name] for t in tensors for name in dict.fromkeys((t.name, *t.names))}
