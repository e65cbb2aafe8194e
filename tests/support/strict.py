"""Simulated ranks on which every operation is a rendezvous when it is issued: the hardest order that a network can ask.

An operation returns once all its members have issued it, and a rank issues one after the other.  A pair of ranks has
one queue for both directions; so has a group, for all that its members do together.  Tags are compared, and match
nothing.  Only the messages of an `exchange` are under way together; communicators are there since `connect`, at which
their members meet.  What has arrived is in its tensor after `wait`, no sooner.

Whatever ends here ends on any transport that starts the operations of a rank in the order of their issue, and holds one
back for others that were issued before: NCCL with a queue for each pair of ranks, for each rank and direction, or for
each group.  For here one waits for all that were issued before, there for those of its queue; and messages of one
direction meet in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any
from unittest.mock import patch

from torch import Tensor

from splitc.runtime.transport import simulated
from splitc.runtime.transport.base import AllOf, CompletedWork, Message, Transport, Work, describe
from splitc.runtime.transport.mailbox import Mailbox
from splitc.runtime.transport.simulated import SimulatedTransport


@contextmanager
def strict_transports() -> Iterator[None]:
    """Let the ranks that are run within have strict transports."""
    with patch.object(simulated, "SimulatedTransport", Strict):
        yield


class Strict(SimulatedTransport):
    """A simulated transport that waits for the other members whenever it issues an operation."""

    waits_hold_the_stream = True  # takes the ways that NCCL takes

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        super().__init__(AtIssue(mailbox), rank)
        self._post = mailbox.join

    def side_group(self) -> Transport:
        """One with a mailbox of its own, whose ranks do not wait for ever for those that failed elsewhere."""
        everyone, own = tuple(range(self.world)), Mailbox(self.world, 60.0)
        return Strict(self._mailbox.join(self.rank, everyone, "side_group", own, itemgetter(0))(), self.rank)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._message("message", tensor, self.rank, dst, tag).wait()
        return CompletedWork()

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        message = self._message("message", tensor, src, self.rank, tag)
        message.met()
        return message

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], ranks: tuple[int, ...], tag: int
    ) -> Work:
        both = [(self.rank, dst, tensor) for tensor, dst in sends]
        both += [(src, self.rank, tensor) for tensor, src in receives]
        what = f"exchange among {ranks}"
        works = [self._message(what, tensor, src, dst, tag) for src, dst, tensor in sorted(both, key=itemgetter(0, 1))]
        for work in works:
            work.met()
        return AllOf(works)

    def _connect(self, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            self._mailbox.join(self.rank, ranks, "connect", None, list)

    def _message(self, what: str, tensor: Tensor, src: int, dst: int, tag: int) -> Met:
        """Join the next message between two ranks, in either direction."""
        pair, sent = (min(src, dst), max(src, dst)), src == self.rank
        asked = f"{what}: {describe(tensor)} from rank {src} to rank {dst}, tag {tag}"
        given = simulated._snapshot(tensor) if sent else None
        return Met(self._post(self.rank, pair, asked, given, itemgetter(pair.index(src))), None if sent else tensor)


class AtIssue(Mailbox):
    """A mailbox whose collectives are complete when they have been joined."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.world, self._join = mailbox.world, mailbox.join

    def join(self, *asked: Any) -> Callable[[], Any]:
        result = self._join(*asked)
        result()
        return result


class Met:
    """A message that both its ranks have joined, or are to join.  tensor: to fill; None on its sender."""

    def __init__(self, met: Callable[[], Tensor], tensor: Tensor | None) -> None:
        self.met, self._tensor = met, tensor

    def wait(self) -> None:
        message, tensor, self._tensor = self.met(), self._tensor, None
        if tensor is not None:
            tensor.detach().copy_(message)
