"""Which rows of parameters each server holds, and the messages between servers and their workers.

Every bucket is spread evenly over the servers, by size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from splitc.ir.layers import StateTensor
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage
from splitc.ir.schedule.actions import Action
from splitc.ir.short_wire import carried
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.runtime.servers import parameter_server


@dataclass(frozen=True)
class Piece(parameter_server.Piece):
    """Rows `first` to `last` of a parameter, along its first dim, which `server` holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def pieces(program: Program, bucket: Sequence[str], servers: Sequence[int]) -> list[Piece]:
    """The pieces of a bucket, in its order.

    The bucket's bytes, one parameter after the other, are cut into as many equal ranges as there are servers; a row
    belongs to the range that its middle lies in.
    """
    return list(_pieces(tuple(program.tensors[name] for name in bucket), tuple(servers)))


@lru_cache(maxsize=1024)
def _pieces(holdings: tuple[StateTensor, ...], servers: tuple[int, ...]) -> tuple[Piece, ...]:
    total, parts = sum(holding.nbytes for holding in holdings), len(servers)
    found: list[Piece] = []
    before = 0
    for holding in holdings:
        rows = holding.shape[0] if holding.shape else 1
        row = max(holding.nbytes // max(rows, 1), 1)
        # Row k's middle lies in range s or a later one from the first k on for which
        # before + (k + 1/2) row >= total s / parts
        starts = [-((-2 * total * s + (2 * before + row) * parts) // (2 * row * parts)) for s in range(parts)]
        bounds = [0, *(min(max(start, 0), rows) for start in starts[1:]), rows]
        for server, (first, last) in zip(servers, pairwise(bounds), strict=True):
            if first < last:
                shape = (last - first, *holding.shape[1:]) if holding.shape else ()
                nbytes = math.prod(shape) * holding.dtype.itemsize
                found.append(Piece(holding.name, server, first, last, nbytes, shape, holding.dtype))
        before += holding.nbytes
    return tuple(found)


def worker_ops(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the messages of a worker's pull or push; a rank that is a server too serves its rows meanwhile."""
    pulls, stage = action.row.what is What.PULL, program.stage(action.role)
    for bucket in reversed(range(len(stage.served))) if pulls else [action.bucket or 0]:
        yield from _of_bucket(program, stage, rank, bucket, pulls)


def server_ops(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield what a dedicated server sends to the workers before a step, or receives from them."""
    pulls = action.row.what is What.PULL
    for stage in program.stages if pulls else reversed(program.stages):
        for bucket in reversed(range(len(stage.served))) if pulls else range(len(stage.served)):
            yield from _of_bucket(program, stage, rank, bucket, pulls)


def _of_bucket(program: PlacedProgram, stage: Stage, rank: int, bucket: int, pulls: bool) -> Iterator[WireOp]:
    """Yield the messages of a bucket that a rank sends or receives: a server with workers, a worker with servers."""
    workers = program.plan.roles[stage.role]
    for message in messages(program, stage.served[bucket]):
        first, *more = message
        serves = first.server == rank
        peers = [worker for worker in workers if worker != rank] if serves else [first.server] * (rank in workers)
        what, rows = What.PULL if pulls else What.PUSH, (first.first, first.last)
        payload = Payload(what, first.name, stage.role, bucket=bucket, rows=rows, more=len(more))
        shape = (sum(math.prod(piece.shape) for piece in message),) if more else first.shape
        sent = sum(piece.nbytes for piece in message) if serves == pulls else 0
        for peer in peers:
            op = WireOp("send" if serves == pulls else "recv", payload, (peer,), shape, first.dtype, sent)
            if pulls:
                yield op
                continue
            for each in carried(program.plan, op, 0, [math.prod(op.shape)] * (op.kind == "send")):
                marks = len(message) * (each.kind == "send" and bool(each.form))  # a byte for each parameter
                yield replace(each, sent=each.sent + marks) if marks else each


def messages(program: PlacedProgram, bucket: Sequence[str]) -> list[tuple[Piece, ...]]:
    """Return the pieces of a bucket in order, packed as the runtime does; each tuple is one message."""
    return parameter_server.coalesce(pieces(program, bucket, program.plan.servers))
