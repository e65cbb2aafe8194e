"""Put the gradients that a role sums into buckets, so that all-reduces run while backward goes on.

This pass rewrites the stages: it fills `Stage.buckets`, `Stage.served` with the gradients that go to servers, and
`Stage.averaged` with what units average after a round.
Backward computes gradients from the last layer to the first, so buckets are filled in that order; every rank starts
them in that order (docs/design/runtime.md, "Order on the wire").  The last bucket holds what remains; small ones
start early.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

from torch.nn.modules.batchnorm import _NormBase

from splitc.checks.graph import buckets_hold_every_gradient, stages_cover_the_graph
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, Program, Stage

_LEAST = 100_000  # bytes of a bucket, below which a sum is mostly latency


@dataclass(frozen=True)
class BucketGradients(Pass[LoweredProgram, LoweredProgram]):
    """Buckets of at least `nbytes`, or a quarter of what a role sums if that is less; one dtype each.

    A tensor as large, and of at least `alone` bytes, has a bucket of its own, so that it is summed where it is.
    """

    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (buckets_hold_every_gradient,)

    nbytes: int = 4_000_000
    alone: int = 1_000_000

    def run(self, program: LoweredProgram) -> LoweredProgram:
        fragments = _fragments(program)
        return replace(program, stages=tuple(self._fill(program, stage, fragments) for stage in program.stages))

    def _fill(self, program: LoweredProgram, stage: Stage, fragments: Mapping[str, tuple[str, int]]) -> Stage:
        summed, pushed = (
            [p for node in stage.graph.nodes if node.target is function for p in node.kwargs["parameters"]]
            for function in (comm_ops.all_reduce, comm_ops.push)
        )
        averaged = [
            (bucket, k)
            for k in range(program.plan.rounds.fragments if program.plan.rounds else 0)
            for bucket in self._buckets(program, [name for name, own in fragments.items() if own == (stage.role, k)])
        ]
        reductions = [node for node in stage.graph.nodes if node.target is comm_ops.all_reduce]
        own = {name for node in reductions for name in node.kwargs.get("own", ())}
        return replace(
            stage,
            own_sums=tuple(name for name in summed if name in own),
            buckets=self._buckets(program, summed, own, max(_nbytes(program, summed) // 4, _LEAST)),
            served=self._buckets(program, pushed),
            averaged=tuple(bucket for bucket, _ in averaged),
            fragments=tuple(k for _, k in averaged),
        )

    def _buckets(
        self, program: Program, names: list[str], own: Collection[str] = (), most: float = math.inf
    ) -> tuple[tuple[str, ...], ...]:
        """`names`, from the last to the first, in buckets by when they are full; those in `own` in others.

        most: bytes of a bucket whose gradients are summed.
        """

        def kind(name: str) -> tuple[object, bool]:
            return program.tensors[name].dtype, name in own

        full: list[tuple[str, ...]] = []
        waiting: list[str] = []
        limit = min(self.nbytes, most)
        alone = max(limit, self.alone) if most < math.inf else math.inf
        for name in reversed(names):
            is_large = program.tensors[name].nbytes >= alone
            if waiting and (kind(waiting[-1]) != kind(name) or (is_large and 2 * _nbytes(program, waiting) >= limit)):
                full.append(tuple(waiting))
                waiting = []
            if is_large:
                full.append((name,))
                continue
            waiting.append(name)
            if _nbytes(program, waiting) >= limit:
                full.append(tuple(waiting))
                waiting = []
        return (*full, tuple(waiting)) if waiting else tuple(full)


def _nbytes(program: Program, names: Iterable[str]) -> int:
    return sum(program.tensors[name].nbytes for name in names)


def _fragments(program: LoweredProgram) -> dict[str, tuple[str, int]]:
    """What units average -> its role, the first of those with a copy, and its fragment.

    Fragments are consecutive in the order of layers, of about as many bytes, and none is empty.
    Raises PlacementError for more fragments than tensors.
    """
    if program.plan.rounds is None:
        return {}
    roles = {name: stage.role for stage in reversed(program.stages) for name in _averaged(program, stage)}
    names = list(dict.fromkeys(name for layer in program.layers for name in layer.tensors if name in roles))
    count = program.plan.rounds.fragments
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
