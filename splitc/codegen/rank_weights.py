"""The initial weights of ranks: of each tensor the part that a rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from splitc.codegen.features import features
from splitc.codegen.rank_spec import rank_spec
from splitc.ir.program import LoweredProgram, Program
from splitc.runtime.weights import part_of


def rank_weights(program: LoweredProgram, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """What each rank holds of the whole model's `weights`; for rank 0 also those that no rank uses."""
    used = _names(program, (name for stage in program.stages for name in stage.tensors))
    for rank in range(program.plan.world):
        stages = [stage for stage in program.stages if rank in program.plan.roles[stage.role]]
        held = _names(program, (name for stage in stages for name in stage.tensors))
        held |= _names(program, (name for feature in features() for name in feature.held(program, rank)))
        shards = {name: shard for role in rank_spec(program, rank).roles for name, shard in role.shards.items()}
        kept = {name: tensor for name, tensor in weights.items() if name in held or (rank == 0 and name not in used)}
        yield {name: part_of(tensor, shards.get(name)).cpu() for name, tensor in kept.items()}


def whole_state(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """The model's state_dict; parameters that no stage tells to be such, and optimizers have too, stay parameters."""
    used, named = _names(program, program.tensors), model.named_parameters()
    unused = {name: nn.Parameter(p.detach().cpu(), p.requires_grad) for name, p in named if name not in used}
    return {key: unused.get(key, tensor.detach()) for key, tensor in model.state_dict().items()}


def _names(program: Program, tensors: Iterable[str]) -> set[str]:
    """All names of the given tensors."""
    return {alias for name in tensors for alias in program.tensors[name].all_names}
