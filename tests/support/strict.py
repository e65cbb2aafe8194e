"""Simulated ranks on which every operation is a rendezvous when it is issued: the hardest order that a network can ask.

An operation returns once all its members have issued it, and a rank issues one after the other.  A pair of ranks has
one queue for both directions; so has a group, for all that its members do together.  Tags are compared, and match
nothing.  Only the messages of an `exchange` are under way together; communicators are there since `connect`, at which
their members meet.  What has arrived is in its tensor after `wait`, no sooner.

Whatever ends here ends on any transport that starts the operations of a rank in the order of their issue, and holds one
back for others that were issued before: NCCL with a queue for each pair of ranks, for each rank and direction, or for
each group.  For here one waits for all that were issued before, there for those of its queue; and messages of one
direction meet in the same order.  `queued_transports` are of the last kind, for what ends there and not here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any
from unittest.mock import patch

from torch import Tensor

from splitc.runtime.transport import simulated
from splitc.runtime.transport.base import AllOf, Message, Transport, Work, describe
from splitc.runtime.transport.mailbox import Mailbox
from splitc.runtime.transport.simulated import SimulatedTransport


@contextmanager
def strict_transports() -> Iterator[None]:
    """Let the ranks that are run within have strict transports."""
    with patch.object(simulated, "SimulatedTransport", Strict):
        yield


@contextmanager
def queued_transports() -> Iterator[None]:
    """Let the ranks that are run within have transports with the queues of NCCL."""
    with patch.object(simulated, "SimulatedTransport", Queued):
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
        message = self._message("message", tensor, self.rank, dst, tag)
        message.met()
        return message

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        message = self._message("message", tensor, src, self.rank, tag)
        message.met()
        return message

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], ranks: tuple[int, ...], tag: int
    ) -> Work:
        works = [self._message(f"exchange among {ranks}", *each, tag) for each in self._in_order(sends, receives)]
        for work in works:
            work.met()
        return AllOf(works)

    def _in_order(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[tuple[Tensor, int, int]]:
        """The messages of an exchange, with source and destination, as both their ranks have them."""
        both = [(tensor, self.rank, dst) for tensor, dst in sends]
        both += [(tensor, src, self.rank) for tensor, src in receives]
        return sorted(both, key=itemgetter(1, 2))

    def _connect(self, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            self._mailbox.join(self.rank, ranks, "connect", None, list)

    def _message(self, what: str, tensor: Tensor, src: int, dst: int, tag: int) -> Met:
        """Join the next message between two ranks, in either direction."""
        return Met(
            self._post(self.rank, *self._asked(what, tensor, src, dst, tag)), None if src == self.rank else tensor
        )

    def _asked(self, what: str, tensor: Tensor, src: int, dst: int, tag: int) -> tuple[Any, ...]:
        """A message as both ranks join it: who, what in words, what this one gives, and what both get of that."""
        pair = min(src, dst), max(src, dst)
        asked = f"{what}: {describe(tensor)} from rank {src} to rank {dst}, tag {tag}"
        return pair, asked, simulated._snapshot(tensor) if src == self.rank else None, itemgetter(pair.index(src))


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


class Queued(Strict):
    """A simulated transport on which operations wait in queues: each group's, and those of messages up and down.

    An operation meets the others when all before it in its queue are complete, whatever its rank does meanwhile.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._queues: Queues = mailbox.__dict__.setdefault("queues", Queues(mailbox))
        super().__init__(mailbox, rank)
        self._mailbox = InQueues(self._queues)

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._issue("up" if dst > self.rank else "down", "message", [(tensor, self.rank, dst)], tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._issue("down" if src > self.rank else "up", "message", [(tensor, src, self.rank)], tag)

    def _exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], ranks: tuple[int, ...], tag: int
    ) -> Work:
        return self._issue(ranks, f"exchange among {ranks}", self._in_order(sends, receives), tag)

    def _issue(self, queue: Any, what: str, messages: Sequence[tuple[Tensor, int, int]], tag: int) -> Work:
        parts, works = [], []
        for tensor, src, dst in messages:
            pair, *asked = self._asked(what, tensor, src, dst, tag)
            parts.append(Part(Channel(pair, queue), *asked))
            met = partial(self._queues.result, self.rank, parts[-1])
            works.append(Met(met, None if src == self.rank else tensor))
        self._queues.issue(self.rank, queue, parts)
        return AllOf(works)


class Channel(tuple[int, ...]):
    """Ranks that meet in one queue, and not in another."""

    queue: Any

    def __new__(cls, ranks: tuple[int, ...], queue: Any) -> Channel:
        made = super().__new__(cls, ranks)
        made.queue = queue
        return made

    def __hash__(self) -> int:
        return hash((tuple(self), self.queue))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Channel) and tuple(self) == tuple(other) and self.queue == other.queue


@dataclass
class Part:
    """One message or collective of an operation.  met: the results of all members, once they have met."""

    channel: Channel
    asked: str
    given: Any
    combine: Callable[[list[Any]], Any]
    met: list[Any] | None = None


@dataclass
class Operation:
    """One element of a queue, such as the messages of an exchange; begun: it has come to the head of its queue."""

    parts: list[Part]
    begun: bool = False


class Queues:
    """The operations of all ranks that are not complete, by rank and queue."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._waiting: dict[Any, deque[Operation]] = defaultdict(deque)

    def issue(self, rank: int, queue: Any, parts: list[Part]) -> None:
        with self.mailbox._changed:
            self._waiting[rank, queue].append(Operation(parts))
            while self._advance():
                pass

    def result(self, rank: int, part: Part) -> Any:
        """What the members of a part have made of it, once they have met."""
        with self.mailbox._changed:
            what = f"{part.asked} over ranks {tuple(part.channel)}"
            self.mailbox._wait(rank, lambda: part.met is not None, lambda: what)
        assert part.met is not None
        return part.met[0]

    def _advance(self) -> bool:
        """Let the first operation of each queue meet the others; whether any has just begun to."""
        moved = False
        for (rank, _), operations in self._waiting.items():
            while operations and all(part.met is not None for part in operations[0].parts):
                operations.popleft()
            if operations and not operations[0].begun:
                operations[0].begun = moved = True
                for part in operations[0].parts:
                    self.mailbox.join(rank, part.channel, part.asked, part, _all_met)
        return moved


def _all_met(parts: list[Part]) -> None:
    result = parts[0].combine([part.given for part in parts])
    for part in parts:
        part.met = [result]


class InQueues(Mailbox):
    """A mailbox whose collectives wait in the queues of their groups."""

    def __init__(self, queues: Queues) -> None:
        self.world, self._queues = queues.mailbox.world, queues

    def join(self, rank: int, ranks: tuple[int, ...], *asked: Any) -> Callable[[], Any]:
        part = Part(Channel(ranks, ranks), *asked)
        self._queues.issue(rank, ranks, [part])
        return partial(self._queues.result, rank, part)
