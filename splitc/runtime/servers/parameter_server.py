"""Synchronous parameter servers (Stanza 2.2 and 5): workers push gradients and pull parameters, servers sum and update.

A step begins with the pulls.  The receives of all buckets are posted at once, in the order in which forward reads
them, and a layer waits for its own bucket only.  Backward pushes each bucket as soon as it is full.  A server adds the
workers' gradients in rank order and leaves the sum in `.grad` of its rows, which its optimizer then updates.

A server on a worker's rank sends its rows of the worker's own tensors when the worker pulls, and receives the other
workers' gradients when it pushes; its optimizer's parameters are views of these rows, so the worker never pulls them.

All ranks go through the messages in one order: by bucket, then by rows, then by worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..collectives.gradients import InOrder
from ..comm.role import Role
from ..memory_format import flat, shaped
from ..spec import Bucket, Served, Shard
from ..transport.base import AllOf, Transport
from ..transport.messages import Arriving
from ..transport.short import Short, decoded
from ..weights import part_of

COALESCED_BELOW = 1 << 20
"""Bytes: smaller pieces share a message with their neighbours; larger ones travel alone, without a copy."""


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that one server holds, with their size in bytes."""

    name: str
    server: int
    first: int
    last: int
    nbytes: int


Message = tuple[Piece, ...]
"""Pieces of one bucket on one server, which travel together."""

P = TypeVar("P", bound=Piece)


def coalesce(pieces: Iterable[P]) -> list[tuple[P, ...]]:
    """The messages that carry a bucket's pieces, in their order."""
    found: list[list[P]] = []
    for piece in pieces:
        joins = found and found[-1][-1].server == piece.server
        if joins and max(piece.nbytes, found[-1][-1].nbytes) < COALESCED_BELOW:
            found[-1].append(piece)
        else:
            found.append([piece])
    return [tuple(message) for message in found]


def served_parameters(stage: nn.Module, rows: Mapping[str, Shard]) -> dict[str, nn.Parameter]:
    """What a server on a worker's rank trains: parameters that are views of its rows of the worker's parameters.

    Names of one tied parameter give one view.
    """
    tensors = dict(stage.named_parameters(remove_duplicate=False))
    made: dict[Tensor, nn.Parameter] = {}
    for name, shard in rows.items():
        if tensors[name] not in made:
            view = part_of(tensors[name].data, shard)  # `.data` has a version counter of its own, which pulls leave
            made[tensors[name]] = nn.Parameter(view)
    return {name: made[tensors[name]] for name in rows}


class Server:
    """The server's side.  parameters: its rows of every parameter that it holds; sums are left in their `.grad`.

    The transport of gradients may be `Short`; parameters travel as they are.
    """

    def __init__(self, role: Role, parameters: Mapping[str, nn.Parameter]) -> None:
        self._role, self._messages, self._rank = role, role.messages, role.transport.rank
        self._parameters = parameters

    def send(self, message: Message, workers: Sequence[int]) -> None:
        """Send its rows to the workers; they must not change before the step's end."""
        rows = _packed([self._parameters[piece.name].detach() for piece in message])
        for worker in workers:
            if worker != self._rank:
                self._messages.send(rows, worker)

    def receive(self, message: Message, workers: Sequence[int], local: Tensor | None = None) -> Arriving:
        """Post the receives of the workers' gradients; on a wait their sum is left in `.grad` of the rows.

        local: this rank's own, where it is a worker too.
        """
        rows, by = [self._parameters[piece.name] for piece in message], self._role.carrying("gradients")
        parts = [local if local is not None and worker == self._rank else _arriving(by, rows) for worker in workers]
        assert local is not None or self._rank not in workers, "a server on a worker's rank receives while it pushes"
        receives = ((part, worker) for part, worker in zip(parts, workers, strict=True) if worker != self._rank)

        def summed() -> Tensor:
            """In rank order, as views of one tensor."""
            total = reduce(Tensor.add_, (_arrived(by, part, rows) for part in parts))
            gradients = [gradient for _, gradient in _unpacked(total, rows)]
            reached = self._messages.transport.decided(_reached(gradients))
            for row, gradient, somewhere in zip(rows, gradients, reached, strict=True):
                row.grad = shaped(flat(gradient, row), row) if somewhere else None
            return total

        return Arriving(AllOf([self._messages.transport.irecv(part, worker) for part, worker in receives]), summed)

    def send_all(self, served: Served, workers: Mapping[str, Sequence[int]]) -> None:
        """Send all rows to the workers, in the order in which forward reads them."""
        for role, buckets in served.items():
            for bucket in reversed(buckets):
                for message in self._messages_of(bucket):
                    self.send(message, workers[role])

    def reduce_all(self, served: Served, workers: Mapping[str, Sequence[int]]) -> None:
        """Sum the workers' gradients; while one bucket is summed only the next one is being received."""
        before = AllOf([])
        for role in reversed(list(served)):
            for bucket in served[role]:
                arriving = AllOf([self.receive(message, workers[role]) for message in self._messages_of(bucket)])
                before.wait()
                before = arriving
        before.wait()

    def _messages_of(self, bucket: Bucket) -> list[Message]:
        """This server's messages of a bucket."""
        held = ((name, rows) for name, parts in bucket.items() for rows in parts if rows.server == self._rank)
        return coalesce(Piece(name, *rows, self._parameters[name].nbytes) for name, rows in held)


class ServedBuckets:
    """The worker's side: the served buckets of one stage.

    server: this rank's side as a server, if it is one too.
    in_order: pushes them strictly in their order.

    After a push `.grad` is None: the gradient is the server's.  A gradient that backward did not reach counts as -0.0,
    and the first number of one that it reached is no -0.0: a sum is -0.0 where all summands are, so that the server
    leaves out, as an optimizer in one process, what no worker reached.
    """

    def __init__(self, role: Role, stage: nn.Module, buckets: Sequence[Bucket], server: Server) -> None:
        self._role, self._messages, self._rank = role, role.messages, role.transport.rank
        self._workers, self._server = role.spec.replicas, server
        self._parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._buckets = [coalesce(_pieces(bucket, self._parameters)) for bucket in buckets]
        self._bucket_parameters = [[self._parameters[name] for name in bucket] for bucket in buckets]
        self.in_order = InOrder(self._bucket_parameters, self._push, "it was pushed")
        self._arriving: dict[int, list[Arriving]] = {}
        self._sums: list[Arriving] = []

    def start_pulls(self) -> None:
        """Post the receives of all buckets, in the order in which forward reads them."""
        for k in reversed(range(len(self._buckets))):
            self._arriving[k] = []
            for message in self._buckets[k]:
                if message[0].server == self._rank:
                    self._server.send(message, self._workers)
                else:
                    rows = [_rows(self._parameters[piece.name], piece) for piece in message]
                    buffer = rows[0] if len(rows) == 1 else _empty(rows)  # one alone is received in place
                    work = self._messages.transport.irecv(buffer, message[0].server)
                    self._arriving[k].append(Arriving(work, partial(_filled, rows, buffer)))

    def pull(self, bucket: int) -> None:
        """Wait until a bucket has arrived."""
        for rows in self._arriving.pop(bucket, ()):
            rows.wait()

    def finish(self) -> None:
        """Finish the sums of the rows that this rank serves."""
        AllOf(self._sums).wait()
        self._sums = []

    def _push(self, bucket: int) -> None:
        packs = [_packed([self._gradient(piece) for piece in message]) for message in self._buckets[bucket]]
        for message, packed in zip(self._buckets[bucket], packs, strict=True):
            if message[0].server == self._rank:
                local = packed.clone() if len(message) == 1 else packed
                self._sums.append(self._server.receive(message, self._workers, local))
            else:
                leaving = _leaving(self._role.carrying("gradients"), packed, message, self._parameters)
                self._messages.send(leaving, message[0].server)
        for parameter in self._bucket_parameters[bucket]:
            parameter.grad = None

    def _gradient(self, piece: Piece) -> Tensor:
        parameter = self._parameters[piece.name]
        if parameter.grad is None:
            return _rows(torch.full_like(parameter, -0.0), piece)
        rows = _rows(parameter.grad.resolve_conj(), piece)
        _mark(rows).add_(0.0)
        return rows


def _mark(gradient: Tensor) -> Tensor:
    """The number that says whether backward reached a gradient: its first."""
    if not gradient.numel():
        return gradient.real.new_ones(1)
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).as_strided((1,), (1,))


def _reached(gradients: Iterable[Tensor]) -> Tensor:
    """Which of them backward reached on any rank."""
    marks = torch.cat([_mark(gradient).reshape(-1) for gradient in gradients])
    return (marks != 0) | ~torch.signbit(marks)


def _leaving(by: Transport, packed: Tensor, message: Message, parameters: Mapping[str, Tensor]) -> Tensor:
    """What is pushed: the gradients, or their bytes in a short format, and behind them the marks, which it may lose."""
    if not (isinstance(by, Short) and by.format.shortens(packed.dtype, packed.numel())):
        return packed
    rows = [_rows(parameters[piece.name], piece) for piece in message]
    reached = _reached(gradient for _, gradient in _unpacked(packed, rows))
    residual = by.residual(f"{message[0].name}[{message[0].first}]", packed)
    return torch.cat([by.leaving(packed.reshape(-1), residual), reached.byte()])


def _arriving(by: Transport, rows: Sequence[Tensor]) -> Tensor:
    """What a push is received in."""
    like = _empty(rows)
    if not (isinstance(by, Short) and by.format.shortens(like.dtype, like.numel())):
        return like
    return torch.empty(by.format.nbytes(like.numel()) + len(rows), dtype=torch.uint8, device=like.device)


def _arrived(by: Transport, data: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The gradients that came, as they were packed."""
    if not (isinstance(by, Short) and data.dtype is torch.uint8):
        return data
    like = _empty(rows)
    packed = decoded(by.format, data[: -len(rows)], like).to(like.dtype).view(like.shape)
    for (_, gradient), reached in zip(_unpacked(packed, rows), data[-len(rows) :], strict=True):
        mark = _mark(gradient)
        mark.copy_(torch.where(reached > 0, mark + 0.0, -0.0))
    return packed


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return part_of(tensor.detach(), Shard(0, piece.first, piece.last))


def _pieces(bucket: Bucket, parameters: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The pieces of a bucket, of a worker's whole parameters."""
    for name, parts in bucket.items():
        row = parameters[name].nbytes // sum(last - first for _, first, last in parts)
        yield from (Piece(name, server, first, last, row * (last - first)) for server, first, last in parts)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The tensors as one flat tensor; a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of `like` with its view of `packed`: the inverse of `_packed`."""
    parts = packed.reshape(-1).split([tensor.numel() for tensor in like])
    return ((tensor, part.view(tensor.shape)) for tensor, part in zip(like, parts, strict=True))


def _filled(rows: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """Copy what came for several rows to where it belongs."""
    for row, values in _unpacked(buffer, rows) if len(rows) > 1 else ():
        row.copy_(values)
    return buffer


def _empty(like: Sequence[Tensor]) -> Tensor:
    """An uninitialised tensor of the shape that `_packed` gives tensors like these."""
    shape = like[0].shape if len(like) == 1 else (sum(tensor.numel() for tensor in like),)
    return torch.empty(shape, dtype=like[0].dtype, device=like[0].device)
