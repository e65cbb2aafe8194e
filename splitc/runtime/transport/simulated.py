"""Ranks as threads of one process: for `verify`, for tests, and for a first look without torchrun.

The ranks share one `Mailbox`, which detects messages and collectives that will never be complete.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from .base import AllOf, CompletedWork, Mismatch, Ranks, Transport, Work, describe, describe_all
from .mailbox import Mailbox

Result = TypeVar("Result")


def run_ranks(world: int, function: Callable[[Transport], Result], timeout: float | None = None) -> list[Result]:
    """Call `function(transport)` on each of `world` threads; return the results in rank order.

    Every run takes its sums in rank order, so that repeating it gives the same bits.  The threads
    share the generators of the process: draw from one of the rank's own, or within `seeded_generators`.

    timeout: seconds that a rank may wait while another one computes; None: as long as that takes.

    Raises the first error that a rank raised, with a note saying which rank it was; the other
    ranks are released, their waits raise PeerLost.  Raises Deadlock when all ranks wait for each
    other, and Mismatch when they disagree or leave a message that nobody received.
    """
    if world < 1:
        raise ValueError(f"cannot run {world} ranks")
    mailbox = Mailbox(world, timeout)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(SimulatedTransport(mailbox, rank))
        except BaseException as error:  # an exit or a test's skip must release the others too
            mailbox.fail(rank, error)
        finally:
            mailbox.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if mailbox.error is not None:
        raise mailbox.error
    if left := mailbox.left_over():
        raise Mismatch("all ranks finished, but something was left behind\n" + "\n".join(left))
    return [results[rank] for rank in range(world)]


class SimulatedTransport(Transport):
    """The transport of one thread among those of `run_ranks`, which makes it.

    Sends are buffered: a tensor may be changed as soon as `isend` returns, which real transports
    do not promise.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.rank = rank
        self.world = mailbox.world
        self.device = torch.device("cpu")
        self._mailbox = mailbox

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._mailbox.put(self.rank, dst, tag, _snapshot(tensor))
        return CompletedWork()

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        what = f"irecv {describe(tensor)} from rank {src}, tag {tag}"
        receive = self._mailbox.expect(self.rank, src, tag, what)

        def fill() -> None:
            message = receive()
            if describe(message) != describe(tensor):
                raise Mismatch(f"rank {self.rank}: {what}, but it sent {describe(message)}")
            tensor.detach().copy_(message)

        return AllOf([], fill)

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False) -> Work:
        merge = _maximum if maximum else _sum
        result = self._mailbox.join(self.rank, ranks, f"all_reduce {describe(tensor)}", _snapshot(tensor), merge)
        return AllOf([], lambda: tensor.detach().copy_(result()))

    def _broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work:
        asked, own = f"broadcast {describe(tensor)} from rank {src}", _snapshot(tensor) if self.rank == src else None
        result = self._mailbox.join(self.rank, ranks, asked, own, itemgetter(ranks.index(src)))
        return AllOf([], result if self.rank == src else lambda: tensor.detach().copy_(result()))

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work:
        result = self._mailbox.join(self.rank, ranks, f"all_gather {describe_all(outputs)}", _snapshot(tensor), list)

        def fill() -> None:
            for output, piece in zip(outputs, result(), strict=True):
                output.detach().copy_(piece)

        return AllOf([], fill)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work:
        def summed(every: list[list[Tensor]]) -> list[Tensor]:
            return [_sum(list(parts)) for parts in zip(*every, strict=True)]

        asked, own = f"reduce_scatter {describe_all(pieces)}", list(map(_snapshot, pieces))
        result = self._mailbox.join(self.rank, ranks, asked, own, summed)
        return AllOf([], lambda: output.detach().copy_(result()[ranks.index(self.rank)]))

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        data = pickle.dumps(value) if self.rank == src else None
        return pickle.loads(self._join_all(f"broadcast_object from rank {src}", data)[src])

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        values = self._join_all(f"gather_objects to rank {dst}", pickle.dumps(value))
        return [pickle.loads(data) for data in values] if self.rank == dst else None

    def barrier(self) -> None:
        self._join_all("barrier", None)

    def _join_all(self, what: str, contribution: Any) -> list[Any]:
        """The contributions of all ranks, once all have joined."""
        contributions: list[Any] = self._mailbox.join(self.rank, tuple(range(self.world)), what, contribution, list)()
        return contributions


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _maximum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)


def _sum(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, parts)
