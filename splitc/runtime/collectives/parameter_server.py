"""Synchronous parameter servers (Stanza 2.2 and 5): workers push gradients and pull parameters, servers sum and update.

A step begins with the pulls.  The receives of all buckets are posted at once, in the order in which forward needs
them, and a layer waits for its own bucket only.  Backward pushes each bucket the moment it is full.  A server adds the
workers' gradients in rank order and leaves the sum in `.grad` of its rows, which its optimizer then updates.

A server beside a worker gives its rows of the worker's own tensors in its pull, and takes the gradients of the others
in its push; its optimizer has parameters that are views of these rows, so that the worker never pulls them.

Everybody goes through the messages in one order: by bucket, then by rows, then by worker (design 8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..transport.base import Work
from ..weights import part_of

if TYPE_CHECKING:
    from ..rank import Rank

Bucket = Mapping[str, Sequence[tuple[int, int, int]]]
"""Parameter -> (server, first row, one past the last) of each of its parts."""

Served = Mapping[str, Sequence[Bucket]]
"""Role of the workers -> its buckets, in the order in which backward fills them."""

ALONE = 1 << 20
"""Bytes from which rows travel as they lie, without a copy; smaller ones share a message with their neighbours."""


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


def messages(pieces: Iterable[Piece]) -> list[Message]:
    """A bucket's pieces, in their order, as they travel."""
    found: list[list[Piece]] = []
    for piece in pieces:
        joins = found and found[-1][-1].server == piece.server
        if joins and max(piece.nbytes, found[-1][-1].nbytes) < ALONE:
            found[-1].append(piece)
        else:
            found.append([piece])
    return [tuple(message) for message in found]


def own_rows(stage: nn.Module, shares: Mapping[str, tuple[int, int, int]]) -> dict[str, nn.Parameter]:
    """What the optimizer of a server beside a worker trains: parameters that are views of its rows of the worker's.

    shares: parameter -> (dim, first, one past the last); the names of a tied one have one parameter.
    """
    tensors = dict(stage.named_parameters(remove_duplicate=False))
    made: dict[Tensor, nn.Parameter] = {}
    for name, share in shares.items():
        if tensors[name] not in made:
            rows = part_of(tensors[name].data, share)  # `.data`: with a version of its own, which pulls do not change
            made[tensors[name]] = nn.Parameter(rows)
    return {name: made[tensors[name]] for name in shares}


class Server:
    """A server's side.  own: its rows of every parameter that it holds any of; the sums are left in their `.grad`."""

    def __init__(self, rank: Rank, own: Mapping[str, nn.Parameter]) -> None:
        self._rank, self._own = rank, own

    def give(self, message: Message, workers: Sequence[int]) -> None:
        """Send its rows to the workers; they must not change before the step's end."""
        rows = _packed([self._own[piece.name].detach() for piece in message])
        for worker in workers:
            if worker != self._rank.index:
                self._rank.post(self._rank.transport.isend(rows, worker), rows.nbytes)

    def expect(self, message: Message, workers: Sequence[int], mine: Tensor | None = None) -> Sum:
        """Post the receives of the workers' gradients.  mine: that of this rank, where it is a worker itself."""
        rows = [self._own[piece.name] for piece in message]
        arriving: list[tuple[Tensor, Work | None]] = []
        for worker in workers:
            if worker == self._rank.index:
                assert mine is not None, "a server beside a worker collects while it pushes"
                arriving.append((mine, None))
            else:
                buffer = _empty(rows)
                arriving.append((buffer, self._rank.transport.irecv(buffer, worker)))
        return Sum(rows, arriving)

    def give_all(self, served: Served, workers: Mapping[str, Sequence[int]]) -> None:
        """Give all rows to the workers, in the order in which forward needs them."""
        for role, buckets in served.items():
            for bucket in reversed(buckets):
                for message in self._mine(bucket):
                    self.give(message, workers[role])

    def collect(self, served: Served, workers: Mapping[str, Sequence[int]]) -> None:
        """Sum the workers' gradients.  While one bucket is summed the next one arrives, and no more is held."""
        before: list[Sum] = []
        for role in reversed(list(served)):
            for bucket in served[role]:
                arriving = [self.expect(message, workers[role]) for message in self._mine(bucket)]
                for each in before:
                    each.finish()
                before = arriving
        for each in before:
            each.finish()

    def _mine(self, bucket: Bucket) -> list[Message]:
        """This server's messages of a bucket."""
        parts = ((name, part) for name, parts in bucket.items() for part in parts if part[0] == self._rank.index)
        return messages(Piece(name, *part, self._own[name].nbytes) for name, part in parts)


class Sum:
    """A sum of gradients that are on their way: (tensor, what to wait for) in rank order, of some `rows`."""

    def __init__(self, rows: Sequence[nn.Parameter], arriving: Sequence[tuple[Tensor, Work | None]]) -> None:
        self._rows, self._arriving = rows, arriving

    def finish(self) -> None:
        """Leave the sum in `.grad`: parts of one tensor."""
        total: Tensor | None = None
        for part, work in self._arriving:
            if work is not None:
                work.wait()
            total = part if total is None else total.add_(part)
        assert total is not None, "a server without workers"
        for rows, gradient in _unpacked(total, self._rows):
            rows.grad = gradient


class Exchange:
    """A worker's side: the buckets of one stage.

    workers: all of the role, in their order.  server: this rank's side as one of the servers, if it is.

    A gradient that was pushed is no longer the worker's: `.grad` is None afterwards.  One that backward did not reach
    counts as zero.  (What the loss can never reach is not served at all: the compiler knows.)
    """

    def __init__(
        self, rank: Rank, stage: nn.Module, buckets: Sequence[Bucket], workers: Sequence[int], server: Server
    ) -> None:
        self.stage = stage
        self._rank, self._workers, self._server = rank, workers, server
        self._parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._buckets = [messages(_pieces(bucket, self._parameters)) for bucket in buckets]
        self._held = [[self._parameters[name] for name in bucket] for bucket in buckets]
        self._awaited: list[set[nn.Parameter]] = []
        self._arriving: dict[int, list[_Arrival]] = {}
        self._sums: list[Sum] = []
        self._pushed = 0
        self._under_way = False
        for k, bucket in enumerate(self._held):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda parameter, k=k: self._arrived(parameter, k))

    # -- parameters ----------------------------------------------------------------------------------------------------

    def start_pulls(self) -> None:
        """Post the receives of all buckets, in the order in which forward needs them."""
        for k in reversed(range(len(self._buckets))):
            self._arriving[k] = []
            for message in self._buckets[k]:
                if message[0].server == self._rank.index:
                    self._server.give(message, self._workers)
                else:
                    rows = [self._rows(self._parameters[piece.name], piece) for piece in message]
                    self._arriving[k].append(_Arrival(self._rank, rows, message[0].server))

    def pull(self, bucket: int) -> None:
        """Wait until a bucket has arrived."""
        for arrival in self._arriving.pop(bucket, ()):
            arrival.land()

    def pull_all(self) -> None:
        """Wait for all parameters before anything is computed (Stanza 5)."""
        self.start_pulls()
        for k in reversed(range(len(self._buckets))):
            self.pull(k)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @contextmanager
    def while_backward(self) -> Iterator[None]:
        """Push buckets strictly in their order, each once the backward inside has filled it."""
        self._awaited = [set(bucket) for bucket in self._held]
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False
        self.push_all()

    def push_all(self) -> None:
        """Push what is left to push, and finish the sums that this rank is the server of."""
        while self._pushed < len(self._buckets):
            self._push()
        for each in self._sums:
            each.finish()
        self._sums, self._pushed = [], 0

    def _arrived(self, parameter: nn.Parameter, k: int) -> None:
        if not self._under_way:
            return
        if k < self._pushed:
            raise RuntimeError(f"a gradient of bucket {k} changed after it was pushed: one backward a step, please")
        self._awaited[k].discard(parameter)
        while self._pushed < len(self._buckets) and not self._awaited[self._pushed]:
            self._push()

    def _push(self) -> None:
        for message in self._buckets[self._pushed]:
            packed = _packed([self._rows(self._gradient(piece.name), piece) for piece in message])
            if message[0].server == self._rank.index:
                mine = packed.clone() if len(message) == 1 else packed
                self._sums.append(self._server.expect(message, self._workers, mine))
            else:
                self._rank.post(self._rank.transport.isend(packed, message[0].server), packed.nbytes)
        for parameter in self._held[self._pushed]:
            parameter.grad = None
        self._pushed += 1

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()

    def _rows(self, tensor: Tensor, piece: Piece) -> Tensor:
        return part_of(tensor.detach(), (0, piece.first, piece.last))


class _Arrival:
    """Rows on their way from a server: one piece straight to where it belongs, several through a buffer."""

    def __init__(self, rank: Rank, rows: Sequence[Tensor], server: int) -> None:
        self._rows = rows
        self._buffer = rows[0] if len(rows) == 1 else _empty(rows)
        self._work = rank.transport.irecv(self._buffer, server)

    def land(self) -> None:
        self._work.wait()
        if len(self._rows) > 1:
            for rows, values in _unpacked(self._buffer, self._rows):
                rows.copy_(values)


def _pieces(bucket: Bucket, parameters: Mapping[str, Tensor]) -> Iterator[Piece]:
    """The pieces of a bucket of whole parameters."""
    for name, parts in bucket.items():
        row = parameters[name].nbytes // sum(last - first for _, first, last in parts)
        yield from (Piece(name, server, first, last, row * (last - first)) for server, first, last in parts)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of several, which travels; a single one stays as it lies."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of `like` with its part of what `_packed` made, in its shape."""
    parts = packed.reshape(-1).split([tensor.numel() for tensor in like])
    return ((tensor, part.view(tensor.shape)) for tensor, part in zip(like, parts, strict=True))


def _empty(like: Sequence[Tensor]) -> Tensor:
    """Room for what `_packed` makes of tensors like these."""
    shape = like[0].shape if len(like) == 1 else (sum(tensor.numel() for tensor in like),)
    return torch.empty(shape, dtype=like[0].dtype, device=like[0].device)
