"""The state that simulated ranks share: messages and collectives under way, and what each rank waits for.

A message stays in the mailbox under (source, destination, tag, number) until it is received; a collective is complete
when its last member has joined.  Everything that a rank can wait for is here, so a deadlock is detected when it
happens: every unfinished rank waits, and none of them is ready.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor

from .base import Deadlock, Mismatch, PeerLost, Ranks, describe


@dataclass
class PendingCollective:
    """One collective: the members' contributions, and the result once all have joined."""

    ranks: Ranks
    asked: dict[int, str] = field(default_factory=dict)
    contributions: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    complete: bool = False

    def missing(self) -> str:
        """The collective as its first members asked for it, and the ranks that have not joined."""
        absent = [str(rank) for rank in self.ranks if rank not in self.asked]
        return f"{self.asked[min(self.asked)]}; not joined by rank {', '.join(absent)}"


class Mailbox:
    """Messages and collectives of all ranks.  Public methods take the lock; the others are called under it."""

    def __init__(self, world: int, timeout: float | None) -> None:
        self.world = world
        self.error: BaseException | None = None
        self._timeout = timeout
        self._changed = threading.Condition()
        self._used: Counter[tuple[Any, ...]] = Counter()
        self._messages: dict[tuple[Any, ...], Tensor] = {}
        self._collectives: dict[tuple[Any, ...], PendingCollective] = {}
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], str]]] = {}  # whether it has come, and what
        self._finished: set[int] = set()

    def put(self, rank: int, dst: int, tag: int, message: Tensor) -> None:
        """Leave a message for rank `dst`."""
        with self._changed:
            self._check_alive(rank)
            self._messages[self._number("sent", rank, dst, tag)] = message
            self._changed.notify_all()

    def expect(self, rank: int, src: int, tag: int, what: str) -> Callable[[], Tensor]:
        """Post the receive of rank `src`'s next message of this tag; the function returned waits for it."""
        with self._changed:
            self._check_alive(rank)
            _, *route = self._number("booked", src, rank, tag)
        key = ("sent", *route)

        def receive() -> Tensor:
            with self._changed:
                self._wait(rank, lambda: key in self._messages, lambda: what)
                return self._messages.pop(key)

        return receive

    def join(
        self, rank: int, ranks: Ranks, asked: str, contribution: Any, combine: Callable[[list[Any]], Any]
    ) -> Callable[[], Any]:
        """Join the next collective of `ranks`; the function returned waits for its result.

        The last rank to join combines the contributions, in rank order.
        """
        with self._changed:
            self._check_alive(rank)
            *_, number = self._number("joined", rank, ranks)
            collective = self._collectives.setdefault((ranks, number), PendingCollective(ranks))
            collective.asked[rank] = f"{asked} over ranks {ranks}"
            collective.contributions[rank] = contribution
            if len(collective.asked) == len(ranks):
                _check_agreed(collective)
                collective.result = combine([collective.contributions[member] for member in ranks])
                collective.contributions.clear()
                collective.complete = True
                del self._collectives[ranks, number]
                self._changed.notify_all()

        def result() -> Any:
            with self._changed:
                self._wait(rank, lambda: collective.complete, collective.missing)
            return collective.result

        return result

    def fail(self, rank: int, error: BaseException) -> None:
        """Release all ranks because `rank` raised `error`; only the first error counts."""
        with self._changed:
            if self.error is None:
                error.add_note(f"raised by simulated rank {rank} of {self.world}")
                self.error = error
            self._changed.notify_all()

    def finish(self, rank: int) -> None:
        """Rank `rank` has finished; ranks that wait for it cannot go on."""
        with self._changed:
            self._finished.add(rank)
            self._find_deadlock()

    def left_over(self) -> list[str]:
        """The messages that were not received and the collectives that a rank did not join, one a line.

        For the end only, when no rank runs.
        """
        missed = [f"  {collective.missing()}" for collective in self._collectives.values()]
        return self._not_received() + sorted(missed)

    def _not_received(self) -> list[str]:
        return [
            f"  not received: {describe(message)} from rank {src} to rank {dst}, tag {tag}"
            for (_, src, dst, tag, _), message in sorted(self._messages.items(), key=itemgetter(0))
        ]

    def _number(self, *route: Any) -> tuple[Any, ...]:
        self._used[route] += 1
        return (*route, self._used[route])

    def _check_alive(self, rank: int) -> None:
        if self.error is not None:
            raise PeerLost(f"rank {rank} is released: {type(self.error).__name__}: {self.error}") from self.error

    def _wait(self, rank: int, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        self._waiting[rank] = ready, what
        self._find_deadlock()
        is_over = self._changed.wait_for(lambda: self.error is not None or ready(), self._timeout)
        del self._waiting[rank]
        self._check_alive(rank)
        if not is_over:
            raise PeerLost(f"rank {rank} waited {self._timeout} s: {what()}")

    def _find_deadlock(self) -> None:
        stuck = self._waiting and len(self._waiting) + len(self._finished) == self.world
        if self.error is not None or not stuck or any(ready() for ready, _ in self._waiting.values()):
            return
        lines = [
            f"  rank {rank} " + (f"waits: {self._waiting[rank][1]()}" if rank in self._waiting else "has finished")
            for rank in range(self.world)
        ]
        self.error = Deadlock("no rank can go on\n" + "\n".join(lines + self._not_received()))
        self._changed.notify_all()


def _check_agreed(collective: PendingCollective) -> None:
    first, *others = collective.ranks
    for other in others:
        if collective.asked[other] != collective.asked[first]:
            raise Mismatch(
                f"rank {first} and rank {other} disagree about one collective\n"
                f"  rank {first}: {collective.asked[first]}\n"
                f"  rank {other}: {collective.asked[other]}"
            )
