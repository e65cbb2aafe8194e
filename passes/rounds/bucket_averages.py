"""Put what units average after a round into buckets, by the fragments of the model that take turns.

This pass rewrites the stages: it fills `Stage.averaged` and `Stage.fragments`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from torch.nn.modules.batchnorm import _NormBase

from splitc.errors import PlacementError
from splitc.ir.pass_manager import Pass
from splitc.ir.program import LoweredProgram, Stage
from splitc.passes.bucket_gradients import BucketGradients, in_buckets
from splitc.runtime.spec import Rounds


@dataclass(frozen=True)
class BucketAverages(Pass[LoweredProgram, LoweredProgram]):
    """Buckets of at least `nbytes`, of one fragment and one dtype each; of parameters, or of statistics."""

    nbytes: int = BucketGradients.nbytes

    def run(self, program: LoweredProgram) -> LoweredProgram:
        if (rounds := program.plan.rounds) is None:
            return program
        fragments = _fragments(program, rounds)
        stages, trained = [], {name for name, tensor in program.tensors.items() if tensor.trainable}
        for stage in program.stages:
            averaged = [
                (bucket, k)
                for k in range(rounds.fragments)
                for own in [[name for name, place in fragments.items() if place == (stage.role, k)]]
                for names in [sorted(own, key=trained.__contains__)]
                for bucket in in_buckets(program, names, self.nbytes, {*own} - trained)
            ]
            buckets, numbers = tuple(bucket for bucket, _ in averaged), tuple(k for _, k in averaged)
            stages.append(replace(stage, averaged=buckets, fragments=numbers))
        return replace(program, stages=tuple(stages))


def _fragments(program: LoweredProgram, rounds: Rounds) -> dict[str, tuple[str, int]]:
    """What units average -> its role, the first of those with a copy, and its fragment.

    Fragments are consecutive in the order of layers, of about as many bytes, and none is empty.
    Raises PlacementError for more fragments than tensors.
    """
    roles = {name: stage.role for stage in reversed(program.stages) for name in _averaged(program, stage)}
    names = list(dict.fromkeys(name for layer in program.layers for name in layer.tensors if name in roles))
    count = rounds.fragments
    if count > max(len(names), 1):
        raise PlacementError(f"{count} fragments were asked for, but units average only {len(names)} tensors")
    sizes = [max(program.tensors[name].nbytes, 1) for name in names]
    middles = [before + size / 2 for before, size in zip(accumulate(sizes, initial=0), sizes, strict=False)]
    found, fragment = {}, -1
    for k, (name, middle) in enumerate(zip(names, middles, strict=True)):
        fragment = min(max(int(count * middle / sum(sizes)), count - len(names) + k), fragment + 1, count - 1)
        found[name] = roles[name], fragment
    return found


def _averaged(program: LoweredProgram, stage: Stage) -> list[str]:
    """What units train apart, and hold whole or in equal shards: parameters, and statistics of normalisations."""
    statistics = {
        f"{path}.{name}"
        for path, module in program.root.named_modules()
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var")
    }
    tensors = program.tensors
    whole = [name for name in stage.tensors if name not in stage.dealt]
    return [name for name in whole if tensors[name].trainable or {name, *tensors[name].names} & statistics]
