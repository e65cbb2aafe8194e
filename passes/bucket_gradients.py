"""Put the gradients that a role sums into buckets, so that all-reduces run while backward goes on.

This pass rewrites the stages: it fills `Stage.buckets`, `Stage.served` with the gradients that go to servers, and
`Stage.averaged` with what units average after a round.
Backward computes gradients from the last layer to the first, so buckets are filled in that order; every rank starts
them in that order (docs/design.md, "Order on the wire").  The last bucket holds what remains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.nn.modules.batchnorm import _NormBase

from splitc.checks.graph import buckets_hold_every_gradient, stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, Program, Stage


@dataclass(frozen=True)
class BucketGradients(Pass[LoweredProgram, LoweredProgram]):
    """Buckets of at least `nbytes`; one dtype each."""

    name: ClassVar[str] = "bucket-gradients"
    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (buckets_hold_every_gradient,)

    nbytes: int = 16_000_000

    def run(self, program: LoweredProgram) -> LoweredProgram:
        return replace(program, stages=tuple(self._fill(program, stage) for stage in program.stages))

    def _fill(self, program: LoweredProgram, stage: Stage) -> Stage:
        summed, pushed = (
            [p for node in stage.graph.nodes if node.target is function for p in node.kwargs["parameters"]]
            for function in (comm_ops.all_reduce, comm_ops.push)
        )
        return replace(
            stage,
            buckets=self._buckets(program, summed),
            served=self._buckets(program, pushed),
            averaged=self._buckets(program, _averaged(program, stage)),
        )

    def _buckets(self, program: Program, names: list[str]) -> tuple[tuple[str, ...], ...]:
        """`names`, from the last to the first, in buckets."""
        buckets: list[list[str]] = []
        size = 0
        for name in reversed(names):
            holding = program.tensors[name]
            full = size >= self.nbytes or (buckets and program.tensors[buckets[-1][0]].dtype != holding.dtype)
            if not buckets or full:
                buckets.append([])
                size = 0
            buckets[-1].append(name)
            size += holding.nbytes
        return tuple(map(tuple, buckets))


def _averaged(program: LoweredProgram, stage: Stage) -> list[str]:
    """What units train apart, and hold whole or in equal shards: parameters, and statistics of normalisations."""
    if program.plan.rounds is None:
        return []
    statistics = {
        f"{path}.{name}"
        for path, module in program.root.named_modules()
        if isinstance(module, _NormBase)
        for name in ("running_mean", "running_var")
    }
    tensors = program.tensors
    whole = [name for name in stage.tensors if name not in stage.dealt]
    return [name for name in whole if tensors[name].trainable or {name, *tensors[name].names} & statistics]
