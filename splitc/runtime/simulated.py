"""Ranks as threads of one process: for `verify`, for tests, and for a first look without torchrun.

The ranks share one board under one lock.  A message stands on it under (source, destination, tag,
number) until it is received; a collective is a meeting that is complete when its last member has
come.  Because everything that a rank can wait for is on the board, a deadlock is seen the moment
it happens: every unfinished rank waits, and none of them is ready.
"""

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from .transport import Deadlock, Done, Mismatch, PeerLost, Transport, Work, describe

Result = TypeVar("Result")


def run_ranks(
    world: int, function: Callable[[Transport], Result], timeout: float = 60.0
) -> list[Result]:
    """Call `function(transport)` on each of `world` threads; return the results in rank order.

    Every run takes its sums in rank order, so that repeating it gives the same bits.  The threads
    share torch's global random generator: draw from a generator of the rank's own.

    timeout: seconds that a rank may wait while another one computes.

    Raises the first error that a rank raised, with a note saying which rank it was; the other
    ranks are released, their waits raise PeerLost.  Raises Deadlock when all ranks wait for each
    other, and Mismatch when they disagree or leave a message that nobody received.
    """
    if world < 1:
        raise ValueError(f"cannot run {world} ranks")
    board = _Board(world, timeout)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(SimulatedTransport(board, rank))
        except BaseException as error:  # an exit or a test's skip must release the others too
            board.fail(rank, error)
        finally:
            board.finish(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if board.error is not None:
        raise board.error
    if left := board.left_over():
        raise Mismatch("all ranks finished, but something was left behind\n" + "\n".join(left))
    return [results[rank] for rank in range(world)]


@dataclass
class _Wait:
    """What one rank waits for: how to tell that it has come, and how to say it."""

    ready: Callable[[], bool]
    what: Callable[[], str]


@dataclass
class _Meeting:
    """One collective: each member's offer, and the result once all have come."""

    ranks: tuple[int, ...]
    asked: dict[int, str] = field(default_factory=dict)
    offers: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    complete: bool = False

    def missing(self) -> str:
        """The collective as its first members asked for it, and who has not come."""
        absent = [str(rank) for rank in self.ranks if rank not in self.asked]
        return f"{self.asked[min(self.asked)]}; not joined by rank {', '.join(absent)}"


class _Board:
    """What all ranks share.  Its public methods take the lock; the others are called under it."""

    def __init__(self, world: int, timeout: float) -> None:
        self.world = world
        self.error: BaseException | None = None
        self._timeout = timeout
        self._changed = threading.Condition()
        self._used: Counter[tuple[Any, ...]] = Counter()
        self._messages: dict[tuple[Any, ...], Tensor] = {}
        self._meetings: dict[tuple[Any, ...], _Meeting] = {}
        self._waiting: dict[int, _Wait] = {}
        self._finished: set[int] = set()

    def put(self, rank: int, dst: int, tag: int, message: Tensor) -> None:
        """Leave a message for rank `dst`."""
        with self._changed:
            self._check_alive(rank)
            self._messages[self._number("sent", rank, dst, tag)] = message
            self._changed.notify_all()

    def expect(self, rank: int, src: int, tag: int, what: str) -> Callable[[], Tensor]:
        """Book rank `src`'s next message of this tag; the function returned waits for it."""
        with self._changed:
            self._check_alive(rank)
            _, *route = self._number("booked", src, rank, tag)
        key = ("sent", *route)

        def take() -> Tensor:
            with self._changed:
                self._wait(rank, _Wait(lambda: key in self._messages, lambda: what))
                return self._messages.pop(key)

        return take

    def join(
        self,
        rank: int,
        ranks: tuple[int, ...],
        asked: str,
        offer: Any,
        combine: Callable[[list[Any]], Any],
    ) -> Callable[[], Any]:
        """Come to the next collective of `ranks`; the function returned waits for its result.

        The last to come combines the offers, in rank order.
        """
        with self._changed:
            self._check_alive(rank)
            *_, number = self._number("joined", rank, ranks)
            meeting = self._meetings.setdefault((ranks, number), _Meeting(ranks))
            meeting.asked[rank] = f"{asked} over ranks {ranks}"
            meeting.offers[rank] = offer
            if len(meeting.asked) == len(ranks):
                _check_agreed(meeting)
                meeting.result = combine([meeting.offers[member] for member in ranks])
                meeting.offers.clear()
                meeting.complete = True
                del self._meetings[ranks, number]
                self._changed.notify_all()

        def leave() -> Any:
            with self._changed:
                self._wait(rank, _Wait(lambda: meeting.complete, meeting.missing))
            return meeting.result

        return leave

    def fail(self, rank: int, error: BaseException) -> None:
        """Release all ranks because `rank` raised `error`; only the first error counts."""
        with self._changed:
            if self.error is None:
                error.add_note(f"raised by simulated rank {rank} of {self.world}")
                self.error = error
            self._changed.notify_all()

    def finish(self, rank: int) -> None:
        """Rank `rank` will do no more; nobody who waits for it can be released now."""
        with self._changed:
            self._finished.add(rank)
            self._find_deadlock()

    def left_over(self) -> list[str]:
        """The messages nobody received and the collectives somebody missed, one a line.

        For the end only, when no rank runs.
        """
        missed = [f"  {meeting.missing()}" for meeting in self._meetings.values()]
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
            raise PeerLost(
                f"rank {rank} is released: {type(self.error).__name__}: {self.error}"
            ) from self.error

    def _wait(self, rank: int, wait: _Wait) -> None:
        self._waiting[rank] = wait
        self._find_deadlock()
        ready = self._changed.wait_for(
            lambda: self.error is not None or wait.ready(), self._timeout
        )
        del self._waiting[rank]
        self._check_alive(rank)
        if not ready:
            raise PeerLost(f"rank {rank} waited {self._timeout} s: {wait.what()}")

    def _find_deadlock(self) -> None:
        stuck = len(self._waiting) + len(self._finished) == self.world
        if self.error is not None or not self._waiting or not stuck:
            return
        if any(wait.ready() for wait in self._waiting.values()):
            return
        lines = [
            f"  rank {rank} "
            + (f"waits: {self._waiting[rank].what()}" if rank in self._waiting else "has finished")
            for rank in range(self.world)
        ]
        self.error = Deadlock("no rank can go on\n" + "\n".join(lines + self._not_received()))
        self._changed.notify_all()


def _check_agreed(meeting: _Meeting) -> None:
    first, *others = meeting.ranks
    for other in others:
        if meeting.asked[other] != meeting.asked[first]:
            raise Mismatch(
                f"rank {first} and rank {other} disagree about one collective\n"
                f"  rank {first}: {meeting.asked[first]}\n"
                f"  rank {other}: {meeting.asked[other]}"
            )


class SimulatedTransport(Transport):
    """The transport of one thread among those of `run_ranks`, which makes it.

    Sends are buffered: a tensor may be changed as soon as `isend` returns, which real transports
    do not promise.
    """

    def __init__(self, board: _Board, rank: int) -> None:
        self.rank = rank
        self.world = board.world
        self.device = torch.device("cpu")
        self._board = board

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._board.put(self.rank, dst, tag, _snapshot(tensor))
        return Done()

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        what = f"irecv {describe(tensor)} from rank {src}, tag {tag}"
        take = self._board.expect(self.rank, src, tag, what)

        def fill() -> None:
            message = take()
            if describe(message) != describe(tensor):
                raise Mismatch(f"rank {self.rank}: {what}, but it sent {describe(message)}")
            tensor.detach().copy_(message)

        return _Once(fill)

    def _all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        leave = self._board.join(
            self.rank, ranks, f"all_reduce {describe(tensor)}", _snapshot(tensor), _sum
        )
        return _Once(lambda: tensor.detach().copy_(leave()))

    def _broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Work:
        leave = self._board.join(
            self.rank,
            ranks,
            f"broadcast {describe(tensor)} from rank {src}",
            _snapshot(tensor) if self.rank == src else None,
            lambda offers: offers[ranks.index(src)],
        )
        if self.rank == src:
            return _Once(leave)
        return _Once(lambda: tensor.detach().copy_(leave()))

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        what = f"all_gather {' + '.join(map(describe, outputs))}"
        leave = self._board.join(self.rank, ranks, what, _snapshot(tensor), list)

        def fill() -> None:
            for output, piece in zip(outputs, leave(), strict=True):
                output.detach().copy_(piece)

        return _Once(fill)

    def _connect(self, ranks: tuple[int, ...]) -> None:
        """Nothing to create: a meeting is made by the first who comes."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        offer = pickle.dumps(value) if self.rank == src else None
        return pickle.loads(self._meet_all(f"broadcast_object from rank {src}", offer)[src])

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        offers = self._meet_all(f"gather_objects to rank {dst}", pickle.dumps(value))
        return [pickle.loads(offer) for offer in offers] if self.rank == dst else None

    def scatter_objects(self, values: Sequence[Any] | None, src: int = 0) -> Any:
        self._check_scatter(values, src)
        offer = [pickle.dumps(value) for value in values or ()] if self.rank == src else None
        offers = self._meet_all(f"scatter_objects from rank {src}", offer)
        return pickle.loads(offers[src][self.rank])

    def barrier(self) -> None:
        self._meet_all("barrier", None)

    def close(self) -> None:
        """Nothing to give up."""

    def _meet_all(self, what: str, offer: Any) -> list[Any]:
        """The offers of all ranks, once all have made theirs."""
        everybody = tuple(range(self.world))
        offers: list[Any] = self._board.join(self.rank, everybody, what, offer, list)()
        return offers


class _Once:
    """A work whose second wait does nothing."""

    def __init__(self, complete: Callable[[], object]) -> None:
        self._complete: Callable[[], object] | None = complete

    def wait(self) -> None:
        if self._complete is not None:
            self._complete()
            self._complete = None


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
