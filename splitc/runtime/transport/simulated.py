"""Ranks as threads of one process: for `verify`, for tests, and for a first look without torchrun.

The ranks share one `Mailbox`, on which a message or a collective is complete or can be seen to never be.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .base import CompletedWork, Mismatch, Transport, Work, describe, describe_all
from .mailbox import Mailbox

Result = TypeVar("Result")


def run_ranks(world: int, function: Callable[[Transport], Result], timeout: float = 60.0) -> list[Result]:
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
    board = Mailbox(world, timeout)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(SimulatedTransport(board, rank))
        except BaseException as error:  # an exit or a test's skip must release the others too
            board.fail(rank, error)
        finally:
            board.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if board.error is not None:
        raise board.error
    if left := board.left_over():
        raise Mismatch("all ranks finished, but something was left behind\n" + "\n".join(left))
    return [results[rank] for rank in range(world)]


class SimulatedTransport(Transport):
    """The transport of one thread among those of `run_ranks`, which makes it.

    Sends are buffered: a tensor may be changed as soon as `isend` returns, which real transports
    do not promise.
    """

    def __init__(self, board: Mailbox, rank: int) -> None:
        self.rank = rank
        self.world = board.world
        self.device = torch.device("cpu")
        self._board = board

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._board.put(self.rank, dst, tag, _snapshot(tensor))
        return CompletedWork()

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
        leave = self._board.join(self.rank, ranks, f"all_reduce {describe(tensor)}", _snapshot(tensor), _sum)
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
        what = f"all_gather {describe_all(outputs)}"
        leave = self._board.join(self.rank, ranks, what, _snapshot(tensor), list)

        def fill() -> None:
            for output, piece in zip(outputs, leave(), strict=True):
                output.detach().copy_(piece)

        return _Once(fill)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]) -> Work:
        leave = self._board.join(
            self.rank,
            ranks,
            f"reduce_scatter {describe_all(pieces)}",
            [_snapshot(piece) for piece in pieces],
            lambda offers: [_sum(list(parts)) for parts in zip(*offers, strict=True)],
        )
        return _Once(lambda: output.detach().copy_(leave()[ranks.index(self.rank)]))

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
