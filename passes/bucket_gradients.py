"""Put the gradients that a role sums into buckets, so that all-reduces run while backward goes on.

This pass rewrites the stages: it fills `Stage.buckets`, and likewise the fields of other verbs that exchange gradients.
Backward computes gradients from the last layer to the first, so buckets are filled in that order; every rank starts
them in that order (docs/design/runtime.md, "Order on the wire").  The last bucket holds what remains; small ones
start early.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from splitc.checks.graph import buckets_hold_every_gradient, stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.device import Link
from splitc.ir.graph import op_name
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, Program, Stage
from splitc.ir.schedule.verbs import SUMS, VERBS

_LEAST = 100_000  # bytes of a bucket, below which a sum is mostly latency


def bucket_bytes(link: Link) -> int | None:
    """Bytes of a bucket that takes 32 times as long on a link as a message's latency; None: no more than usual.

    So starting an all-reduce costs about a thirtieth of its transfer.  More than 64 MB would come late.
    """
    found = round(32 * link.latency * link.bandwidth, -6)
    return min(int(found), 64_000_000) if found > BucketGradients.nbytes else None


@dataclass(frozen=True)
class BucketGradients(Pass[LoweredProgram, LoweredProgram]):
    """Buckets of at least `nbytes`, or a quarter of what a role sums if that is less; one dtype each.

    Those of sums have as many as the plan says, where it does.
    A tensor as large, and of at least `alone` bytes, has a bucket of its own, so that it is summed where it is.
    """

    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (buckets_hold_every_gradient,)

    nbytes: int = 4_000_000
    alone: int = 1_000_000

    def run(self, program: LoweredProgram) -> LoweredProgram:
        return replace(program, stages=tuple(self._fill(program, stage) for stage in program.stages))

    def _fill(self, program: LoweredProgram, stage: Stage) -> Stage:
        nodes = [(node, op_name(node)) for node in stage.graph.nodes if comm_ops.op_of(node) is not None]
        named = {
            verb: [p for node, name in nodes if name == verb for p in node.kwargs["parameters"]]
            for verb in SUMS.values()
        }
        own = {name for node, op in nodes if op == "all_reduce" for name in node.kwargs.get("own", ())}
        summed = named["all_reduce"]
        found: dict[str, Any] = {VERBS[verb].buckets: in_buckets(program, p, self.nbytes) for verb, p in named.items()}
        found["buckets"] = self._of_sums(program, summed, own)
        return replace(stage, own_sums=tuple(name for name in summed if name in own), **found)

    def _of_sums(self, program: LoweredProgram, names: list[str], own: Collection[str]) -> tuple[tuple[str, ...], ...]:
        limit = min(program.plan.bucket_bytes or self.nbytes, max(_nbytes(program, names) // 4, _LEAST))
        return in_buckets(program, names, limit, own, max(limit, self.alone))


def in_buckets(
    program: Program, names: list[str], limit: int, own: Collection[str] = (), alone: float = math.inf
) -> tuple[tuple[str, ...], ...]:
    """`names`, from the last to the first, in buckets by when they are full; those in `own` in others.

    limit: bytes of a full bucket.  alone: of a tensor that has a bucket of its own.
    """

    def kind(name: str) -> tuple[object, bool]:
        return program.tensors[name].dtype, name in own

    full: list[tuple[str, ...]] = []
    waiting, nbytes = list[str](), 0
    for name in reversed(names):
        is_large = program.tensors[name].nbytes >= alone
        if waiting and (kind(waiting[-1]) != kind(name) or (is_large and 2 * nbytes >= limit)):
            full.append(tuple(waiting))
            waiting, nbytes = [], 0
        if is_large:
            full.append((name,))
            continue
        waiting.append(name)
        nbytes += program.tensors[name].nbytes
        if nbytes >= limit:
            full.append(tuple(waiting))
            waiting, nbytes = [], 0
    return (*full, tuple(waiting)) if waiting else tuple(full)


def _nbytes(program: Program, names: Iterable[str]) -> int:
    return sum(program.tensors[name].nbytes for name in names)
