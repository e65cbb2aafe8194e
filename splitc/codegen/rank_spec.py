"""Describe a rank of a lowered program as the runtime takes it: its roles, its peers, and the data it reads."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from splitc.codegen.features import features
from splitc.codegen.stage_names import receiving
from splitc.ir.program import LoweredProgram, Refusal, Stage
from splitc.ir.wire import shard_of
from splitc.runtime.spec import Input, RankSpec, RoleSpec, Route, Shard

IDLE = "idle"
"""The role of ranks that a plan gives no work."""


def rank_spec(program: LoweredProgram, rank: int) -> RankSpec:
    """Describe a rank; one that has no rank program is idle."""
    plan = program.plan
    stages = [program.stage(role) for role in plan.roles_of(rank)]
    inputs = [i for stage in stages for name in stage.inputs for i in program.inputs if i.name == name]
    spec = RankSpec(
        rank,
        plan.world,
        tuple(role_spec(program, stage, rank) for stage in stages) or (RoleSpec(IDLE, replicas=(rank,)),),
        plan.roles[plan.reader],
        plan.batch_offsets[plan.reader],
        {
            i.name: Input(
                i.loose or i.spec.template(), str(i.spec.dtype).removeprefix("torch."), i.high, i.path, i.low or None
            )
            for i in inputs
        },
        guards=program.guards,
        no_evaluation=program.evaluated.why if isinstance(program.evaluated, Refusal) else "",
        accumulate=plan.accumulate,
        **_predicting(program, rank),
        scales_loss=program.autocast == torch.float16,
        wire=plan.wire,
        sum_shares=plan.sum_shares,
    )
    return reduce(lambda spec, feature: feature.of_rank(program, spec), features(), spec)


def _predicting(program: LoweredProgram, rank: int) -> dict[str, Any]:
    """The inputs that a rank gives to `predict`, why there is none, and its communicator as one that reads data."""
    if isinstance(outputs := program.predicted, Refusal):
        return {"no_outputs": outputs.why}
    stages = [outputs.stage(role) for role in outputs.plan.roles_of(rank)]
    readers = [stage for stage in stages if stage.role in receiving(outputs)]
    reader = replace(role_spec(outputs, readers[0], rank), replicas=(rank,)) if readers else None
    return {"predicts": tuple(name for stage in stages for name in stage.inputs), "reader": reader}


def trained_every_microbatch(program: LoweredProgram, stage: Stage) -> tuple[str, ...]:
    """The parameters of a stage that the optimizer updates after every microbatch, not once a step."""
    if program.plan.grouping(stage.role).updates == "once":
        return ()
    return tuple(name for name in stage.tensors if program.tensors[name].trainable)


def role_spec(program: LoweredProgram, stage: Stage, rank: int) -> RoleSpec:
    """Describe a rank in one of its roles."""
    plan, role = program.plan, stage.role
    group = plan.group(role, rank) if role in plan.groups else ()
    beside = [each for each in (program.evaluated, program.predicted) if not isinstance(each, Refusal)]
    stages = [stage, *(each for other in beside for each in other.stages if each.role == role)]
    cuts = [c for each in stages for c in (*each.receives, *each.sends) if c.sent]
    together = {c.other(role): c.consumer for c in cuts if c.together()}
    owners = plan.owners(role, rank)
    named = ((name, each) for name in stage.shards for each in program.tensors[name].all_names)
    shards = ((each, shard_of(program, stage, name, owners.index(rank), len(owners))) for name, each in named)

    def routes(other: str, grouped: str = "") -> tuple[Route, ...]:
        found = (plan if other in plan.roles else beside[-1].plan).routes(rank, role, other, grouped)
        return tuple(Route(*route) for route in found)

    spec = RoleSpec(
        role,
        plan.interval(role, rank),
        plan.replicas(role, rank),
        {other: routes(other) for other in dict.fromkeys(c.other(role) for c in cuts)},
        group,
        plan.groups[role].scheme if group else "BK",
        plan.microbatches,
        trained_every_microbatch(program, stage),
        {name: Shard(*shard) for name, shard in shards if shard is not None},
        plan.all_reduce,
        group_routes={other: routes(other, grouped) for other, grouped in together.items()},
        ranks=plan.together(role, rank) if any(node.kwargs.get("own") for node in stage.graph.nodes) else (),
        own_sums=stage.own_sums,
    )
    return reduce(lambda spec, feature: feature.of_role(program, rank, spec), features(), spec)
