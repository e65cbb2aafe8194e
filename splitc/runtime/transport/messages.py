"""The point-to-point messages of one rank's step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from .base import Transport, Work


class Arriving:
    """A tensor that is made of what other ranks send.  finish: makes it, once `work` is complete."""

    def __init__(self, work: Work, finish: Callable[[], Tensor]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """The tensor, once all of it has come."""
        self._work.wait()
        return self._finish()


class Messages:
    """Sends of one rank, kept until an answer comes or the step ends.

    local: from one of its roles to another, the oldest first: what stays in memory.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._pending: defaultdict[object, list[Work]] = defaultdict(list)
        self._unfinished: list[Callable[[], None]] = []
        self.local: defaultdict[tuple[str, str], deque[Tensor]] = defaultdict(deque)

    def send(self, tensor: Tensor, dst: int, answer: object = None, by: Transport | None = None) -> None:
        """Start to send `tensor`, which must not change before `wait`.  answer: what shows that it has arrived."""
        self._pending[answer].append((by or self.transport).isend(tensor, dst))

    def at_end(self, finish: Callable[[], None]) -> None:
        """Let `finish`, which waits for other ranks, be called once all that the step has for them is under way."""
        self._unfinished.append(finish)

    def finish(self) -> None:
        """Call all that was left for the end of the step."""
        for finish in self._unfinished:
            finish()
        self._unfinished.clear()

    def answered(self, answer: object) -> None:
        """Let go of what was sent until `answer` came."""
        for work in self._pending.pop(answer, ()):
            work.wait()

    def wait(self) -> None:
        """Return when all sends are complete, and their tensors may be reused."""
        for answer in list(self._pending):
            self.answered(answer)
