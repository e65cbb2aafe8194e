"""The initial weights of ranks: of each tensor the part that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from splitc.codegen.rank_spec import rank_spec
from splitc.ir.program import LoweredProgram
from splitc.runtime.weights import part_of


def rank_weights(program: LoweredProgram, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What each rank holds of the whole model's `weights`; for rank 0 also those that no rank uses."""
    used = _names(program, (name for stage in program.stages for name in stage.tensors))
    for rank in range(program.plan.world):
        stages = [stage for stage in program.stages if rank in program.plan.roles[stage.role]]
        held = _names(program, (name for stage in stages for name in stage.tensors))
        if rank in program.plan.servers:
            held |= _names(program, (name for stage in program.stages for bucket in stage.served for name in bucket))
        shards = {name: shard for role in rank_spec(program, rank).roles for name, shard in role.shards.items()}
        kept = {name: tensor for name, tensor in weights.items() if name in held or (rank == 0 and name not in used)}
        yield {name: part_of(tensor, shards.get(name)).cpu() for name, tensor in kept.items()}


def _names(program: LoweredProgram, tensors: Iterable[str]) -> set[str]:
    """All names of the given tensors."""
    return {alias for name in tensors for alias in (name, *program.tensors[name].names)}
