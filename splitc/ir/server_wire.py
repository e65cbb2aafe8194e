"""The messages between parameter servers and their workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from splitc.ir.actions import Action
from splitc.ir.program import LoweredProgram, PlacedProgram, Stage
from splitc.ir.server_rows import Piece, pieces
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.runtime.collectives.parameter_server import coalesce


def worker_ops(program: PlacedProgram, stage: Stage, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the messages of a worker's pull or push; a rank that is a server too serves its rows meanwhile."""
    pulls = action.verb == "pull"
    buckets = reversed(range(len(stage.served))) if pulls else [action.bucket or 0]
    for bucket in buckets:
        for message in messages(program, stage.served[bucket]):
            if message[0].server == rank:
                yield from _of_server(program, stage, bucket, message, pulls)
            else:
                yield _message("recv" if pulls else "send", stage, bucket, message, pulls, message[0].server)


def server_ops(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield what a dedicated server sends to the workers before a step, or receives from them."""
    pulls = action.verb == "send_parameters"
    for stage in program.stages if pulls else reversed(program.stages):
        for bucket in reversed(range(len(stage.served))) if pulls else range(len(stage.served)):
            for message in messages(program, stage.served[bucket]):
                if message[0].server == rank:
                    yield from _of_server(program, stage, bucket, message, pulls)


def _of_server(
    program: PlacedProgram, stage: Stage, bucket: int, message: Sequence[Piece], pulls: bool
) -> Iterator[WireOp]:
    for worker in program.plan.roles[stage.role]:
        if worker != message[0].server:
            yield _message("send" if pulls else "recv", stage, bucket, message, pulls, worker)


def _message(kind: str, stage: Stage, bucket: int, message: Sequence[Piece], pulls: bool, peer: int) -> WireOp:
    first, *more = message
    payload = Payload(
        What.PULL if pulls else What.PUSH,
        first.name,
        stage.role,
        bucket=bucket,
        rows=(first.first, first.last),
        more=len(more),
    )
    shape = (sum(math.prod(piece.shape) for piece in message),) if more else first.shape
    sent = sum(piece.nbytes for piece in message) if kind == "send" else 0
    return WireOp(kind, payload, (peer,), shape, first.dtype, sent)


def messages(program: PlacedProgram, bucket: Sequence[str]) -> list[tuple[Piece, ...]]:
    """Return the pieces of a bucket in order, packed as the runtime does; each tuple is one message."""
    return coalesce(pieces(program, bucket, program.plan.servers))
