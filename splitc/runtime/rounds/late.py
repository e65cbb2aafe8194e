"""Average with units that may be late, or leave and come back: nobody waits for longer than it has patience.

The rank of the first unit is the hub of its slices.  Between it and the rank of each other unit at most one message is
under way, in turns: a change, then its answer.

    hub       kept = SGD(kept, gradient = mean over the units that came  (kept - theta))
              answer = kept - what that unit has of it
    another   kept = kept + answer

Who was late is not waited for until it is heard again.  A change of a turn that is over is left out, but answered.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..comm.role import Role
from ..errors import LaunchError, SplitcError
from ..transport.base import Transport, Work
from ..transport.short import Short, decoded
from .averaging import Averages, Bucket, Meanwhile

_FOREVER = 30 * 86400.0  # seconds that a message may be on its way before its connection is given up
_HEAD = 2 * 8  # bytes of the numbers of a message


class Line:
    """The messages between this rank and that of another unit: a turn, infinite in the last one; a share; numbers.

    late: whether what was expected did not come in time.  came: what did, until it was dealt with.  coming: what is
    expected.  had: first of a bucket -> the slice of `kept` that the other rank has.
    """

    def __init__(self, transport: Transport, peer: int, nbytes: int, kept: Mapping[Tensor, Tensor]) -> None:
        self.peer, self.late, self.had = peer, False, {first: each.detach().clone() for first, each in kept.items()}
        self.came: tuple[float, float, Tensor] | None = None
        self.coming: tuple[Tensor, Work, threading.Event | None] | None = None
        self._sent: tuple[Tensor, Work] | None = None
        self._transport, self._pair = transport, (min(peer, transport.rank), max(peer, transport.rank))
        self._nbytes = _HEAD + nbytes

    def send(self, turn: float, share: float = 0.0, parts: Sequence[Tensor] = ()) -> Work:
        """Start to send; what was sent before has arrived."""
        head = torch.tensor([turn, share], dtype=torch.float64).view(torch.uint8).to(self._transport.device)
        data = torch.cat([head, *parts, head.new_zeros(self._nbytes - _HEAD - sum(map(len, parts)))])
        self._sent = data, self._transport.broadcast(data, self._transport.rank, self._pair)
        return self._sent[1]

    def expect(self) -> None:
        """Start to receive the next message."""
        data, done = torch.empty(self._nbytes, dtype=torch.uint8, device=self._transport.device), threading.Event()
        work = self._transport.broadcast(data, self.peer, self._pair)
        self.coming = data, work, done if self._transport.when_complete(work, done.set) else None

    def receive(self, seconds: float = threading.TIMEOUT_MAX) -> None:
        """Take what comes within so many seconds; where the transport cannot tell, it is waited for."""
        if self.came is not None or self.coming is None:
            return
        data, work, done = self.coming
        if done.wait(seconds) if done is not None else seconds:
            for each in (work, *(self._sent or ())[1:]):
                each.wait()
            self.coming = self._sent = None
            turn, share = data[:_HEAD].cpu().view(torch.float64).tolist()
            self.came = turn, share, data[_HEAD:]


@dataclass
class Turn:
    """A fragment on its way, and the sums of changes times shares, of this rank's at first; none once it is over."""

    number: int
    buckets: Sequence[Bucket]
    meanwhile: list[Meanwhile]
    share: float
    sums: list[Tensor]


class LateAverages(Averages):
    """Averages that leave out who is not there in time.

    transport: of connections of their own.  patience: seconds.
    """

    def __init__(self, role: Role, transport: Transport, patience: float) -> None:
        super().__init__(role)
        self._form, self._short = self._short, None  # what ends a round is exact
        self._role, self._apart, self._patience = role, transport, patience
        self._is_hub = self._ranks[0] == transport.rank
        self._lines, self._fragments = list[Line](), list[list[Bucket]]()
        self._turn: Turn | None = None
        self._asked, self._was_late, self._is_open = 0, False, False

    def open(self, buckets: Sequence[Bucket], fragments: Sequence[int]) -> None:
        """Begin a round, after `keep`.  fragments: of the buckets."""
        of = list(zip(buckets, fragments, strict=True))
        self._fragments = [[bucket for bucket, own in of if own == k] for k in range(max(fragments) + 1)]
        self._is_open = True
        nbytes, self._turn = max(sum(map(self._nbytes, each)) for each in self._fragments), None
        peers = self._ranks[1:] if self._is_hub else self._ranks[:1]
        self._lines = [Line(self._apart, peer, nbytes, self.kept) for peer in peers]
        for line in self._lines if self._is_hub else ():
            line.expect()

    @torch.no_grad()
    def start(self, buckets: Sequence[Bucket], fragment: int, share: float, mixing: float | None = None) -> None:
        number, changes = self._role.context.round * len(self._fragments) + fragment, list(map(self._change, buckets))
        meanwhile = [Meanwhile(bucket, mixing) for bucket in buckets]
        self._turn = Turn(number, buckets, meanwhile, share, [change * share for change in changes])
        if self._is_hub:
            self.poll()
        elif self._lines[0].coming is None:
            of = enumerate(zip(buckets, changes, strict=True))
            self._lines[0].send(number, share, [self._leaving(*each, f"{fragment}.{k}") for k, each in of])
            self._lines[0].expect()
            self._asked = fragment

    @torch.no_grad()
    def arrive(self, fragment: int, whole: bool = False) -> None:
        if (turn := self._turn) is None or turn.number % len(self._fragments) != fragment:
            return
        is_there = self._is_hub
        if self._is_hub:
            self.poll(self._patience, ends=True)
        elif self._asked == fragment:
            self._take(0.0 if self._lines[0].late else self._patience)
            is_there, self._lines[0].came = self._lines[0].came is not None, None
        self._turn = None
        for bucket, meanwhile in zip(turn.buckets, turn.meanwhile, strict=True):
            own = self.kept[bucket[0]].detach() if is_there else self._own(bucket, meanwhile.nothing)
            self._put(bucket, own, None if whole else meanwhile)

    @torch.no_grad()
    def hang_up(self) -> None:
        """Before a round ends, or a program that left one open, wait for all that is under way: then nothing is."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_hub:
            self.poll(self._patience, ends=True)
        for line in self._lines:
            self._was_late = line.late and not self._is_hub
            if not self._is_hub:
                self._take(threading.TIMEOUT_MAX)
                line.send(math.inf).wait()
                continue
            line.receive()
            while line.came is not None and line.came[0] < math.inf:
                self._answer(line)
                line.receive()

    @torch.no_grad()
    def join(self, buckets: Sequence[Bucket], fragment: int, share: float) -> None:
        self.arrive(fragment, whole=not share)
        if share:
            super().start(buckets, fragment, 0.0 if self._was_late else share, mixing=0.0)
            super().arrive(fragment)
        for bucket in buckets:
            own = self.kept[bucket[0]].detach()
            self._transport.broadcast(own, self._ranks[0], self._ranks).wait()
            self._put(bucket, own)

    @torch.no_grad()
    def poll(self, seconds: float = 0.0, ends: bool = False) -> None:
        """On a hub, take the changes that come within so many seconds.

        Once no more are awaited, or if the turn ends, update the fragment by their mean, and answer who sent them.
        """
        turn, deadline = self._turn, time.monotonic() + seconds
        for line in self._lines if self._is_hub else ():
            line.receive(max(0.0, deadline - time.monotonic()) if not line.late else 0.0)
            if turn is None or line.came is None:
                continue
            if line.came[0] < turn.number + (not turn.sums):  # too late
                self._answer(line)
            else:
                self._note(line, late=False)
        came = [line.came for line in self._lines if line.came is not None]
        awaited = not came or any(not line.late and line.came is None for line in self._lines)
        if turn is None or not turn.sums or (awaited and not ends):
            return
        weight = turn.share
        for number, share, data in came:
            changes = self._arriving(turn.buckets, data) if number == turn.number else ()
            weight += share * (number == turn.number)
            for total, change in zip(turn.sums, changes, strict=False):
                total.add_(change, alpha=share)
        for bucket in turn.buckets:
            self.kept[bucket[0]].grad = turn.sums.pop(0).div_(-weight or 1.0)
        self._step()
        for line in self._lines:
            if line.came is None:
                self._note(line, late=True)
            elif line.came[0] == turn.number:
                self._answer(line)

    def _answer(self, line: Line) -> None:
        """Send what the other rank lacks of the fragment that its change is of."""
        assert line.came is not None
        (turn, *_), line.came, parts = line.came, None, list[Tensor]()
        for bucket in self._fragments[int(turn) % len(self._fragments)]:
            had = line.had[bucket[0]]
            parts.append(self._leaving(bucket, self.kept[bucket[0]].detach() - had))
            had += next(self._arriving([bucket], parts[-1]))
        line.send(turn, 0.0, parts)
        line.expect()

    def _take(self, seconds: float) -> None:
        """On another rank, take the answer that is awaited, if it comes within so many seconds."""
        (line,), buckets = self._lines, self._fragments[self._asked]
        if line.coming is not None:
            line.receive(seconds)
            self._note(line, late=line.came is None)
            for bucket, answer in zip(buckets, self._arriving(buckets, line.came[2]), strict=True) if line.came else ():
                self.kept[bucket[0]].data += answer

    def _format(self, bucket: Bucket) -> Short | None:
        """That of the changes of a bucket; those of statistics are exact."""
        kept, form = self.kept[bucket[0]], self._form if isinstance(bucket[0], nn.Parameter) else None
        return form if form is not None and form.format.shortens(kept.dtype, kept.numel()) else None

    def _nbytes(self, bucket: Bucket) -> int:
        kept, form = self.kept[bucket[0]], self._format(bucket)
        return kept.nbytes if form is None else form.format.nbytes(kept.numel())

    def _leaving(self, bucket: Bucket, numbers: Tensor, name: str = "") -> Tensor:
        """The bytes in which numbers of a bucket travel; with a name what they lose is added to the next ones."""
        form = self._format(bucket)
        return numbers.view(torch.uint8) if form is None else form.leaving(numbers, form.residual(name, numbers))

    def _arriving(self, buckets: Sequence[Bucket], data: Tensor) -> Iterator[Tensor]:
        """Yield the numbers of buckets that travelled in these bytes."""
        for bucket in buckets:
            form, like, own = self._format(bucket), self.kept[bucket[0]], data[: self._nbytes(bucket)].clone()
            yield own.view(like.dtype) if form is None else decoded(form.format, own, like)
            data = data[len(own) :]

    def _note(self, line: Line, late: bool) -> None:
        """Keep whether another rank, or on another one this unit, is late; say so where that changes."""
        if line.late != late and self._apart.rank == self._role.spec.unit[0]:
            away = line.peer - self._apart.rank if self._is_hub else 0
            ranks = ", ".join(str(rank + away) for rank in self._role.spec.unit)
            what = f"are left out: nothing came in {self._patience:g} s" if late else "are back"
            print(f"round {self._role.context.round}: ranks {ranks} {what}", file=sys.stderr, flush=True)
        line.late = late


def _leave(averages: LateAverages) -> None:
    """Hang up as the process exits, which threads that wait for messages would keep from it."""
    with suppress(SplitcError, RuntimeError, ValueError):  # the other rank has gone, or the process group
        averages.hang_up()


def late_averages(roles: Sequence[Role], patience: float) -> list[LateAverages]:
    """Those of a rank's roles, on connections on which ranks may be late.  Collective."""
    own = roles[0].transport
    if own.waits_hold_the_stream:
        raise LaunchError("patience needs messages that may be late, which NCCL has not: take the backend gloo")
    apart, each = own.apart(_FOREVER), [role.spec.averaged for role in roles]
    transport = apart or own
    transport.connect([(first, other) for first, *more in each for other in more if own.rank in (first, other)])
    found = [LateAverages(role, transport, patience) for role in roles]
    for averages in found if apart is not None else ():
        atexit.register(_leave, averages)
    return found
