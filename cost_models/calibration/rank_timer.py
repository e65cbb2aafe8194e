"""Time operations in which several ranks take part.

An operation runs once to warm up, then repeatedly for as long as its budget allows, without barriers: the ranks wait
for each other within it.  Where a wait holds the GPU's stream, several runs are issued before the GPU is waited for,
which takes longer than a small transfer.  The result is the midmean of a rank's runs, the mean of their middle half:
other processes only slow some runs down, and a send that ends in a kernel buffer delays the next one by what it saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from splitc.runtime.transport.base import Transport

Progress = Callable[[str], None]

LEAST, MOST = 3, 400  # timed runs
AHEAD, _AHEAD = 5e-3, 100  # seconds that runs take which are issued before the GPU is waited for, and how many at most
_FIGURES = 3  # floats that ranks exchange at once


def no_progress(_: str) -> None:
    """Report nothing."""


class RankTimer:
    """Times operations of the ranks of a transport.  Its methods are collective and return the same on all ranks.

    spent: seconds that all timing so far has taken.  device: that of the tensors; a GPU that is given here copies in
    the order of its stream, as NCCL does.  ahead: whether it does.
    """

    def __init__(
        self, transport: Transport, progress: Progress = no_progress, device: torch.device | None = None
    ) -> None:
        self.transport, self.device = transport, device or transport.device
        self.rank, self.world = transport.rank, transport.world
        self.ahead = device is not None or transport.waits_hold_the_stream
        self.progress = progress
        self.spent = 0.0
        self._buffers: list[Tensor] = []

    def seconds(self, ranks: Sequence[int], run: Callable[[], object], allowed: float) -> float:
        """Seconds that `run`, an operation of `ranks`, takes the slowest of them; the other ranks wait.

        allowed: budget of all runs (s).
        """

        def timed(times: int = 1) -> tuple[float]:
            begin = time.perf_counter()
            for _ in range(times):
                run()
            self.settle()
            return ((time.perf_counter() - begin) / times,)

        took = self._first(ranks, timed)
        times = min(_AHEAD, max(1, int(AHEAD / max(took, 1e-9)))) if self.ahead else 1
        return max(figures[0] for figures in self._repeated(ranks, partial(timed, times), allowed, times * took))

    def figures(
        self, ranks: Sequence[int], run: Callable[[], tuple[float, ...]], allowed: float
    ) -> list[tuple[float, ...]]:
        """By rank of `ranks`, the midmeans of the figures that `run` returns, at most two."""
        return self._repeated(ranks, run, allowed, self._first(ranks, run))

    def _first(self, ranks: Sequence[int], run: Callable[[], object]) -> float:
        """Seconds that the slowest of `ranks` takes for a run that warms up."""
        begin = time.perf_counter()
        if self.rank in ranks:
            run()
        took = max(first for first, *_ in self._all_gather_floats((time.perf_counter() - begin) * (self.rank in ranks)))
        self.spent += took
        return took

    def _repeated(
        self, ranks: Sequence[int], run: Callable[[], tuple[float, ...]], allowed: float, took: float
    ) -> list[tuple[float, ...]]:
        """As `figures`, where a run takes `took` seconds."""
        takes_part = self.rank in ranks
        begin = time.perf_counter()
        runs = min(MOST, max(LEAST, int(allowed / max(took, 1e-9)) - 1))
        seen = [run() for _ in range(runs)] if takes_part else []
        mine = [midmean(values) for values in zip(*seen, strict=True)]
        found = self._all_gather_floats(time.perf_counter() - begin, *mine)
        self.spent += max(whole for whole, *_ in found)
        return [tuple(figures) for rank, (_, *figures) in enumerate(found) if rank in ranks]

    def _all_gather_floats(self, *figures: float) -> list[list[float]]:
        """All ranks' figures, without pickling."""
        own = torch.zeros(_FIGURES, dtype=torch.float64, device=self.device)
        own[: len(figures)] = torch.tensor(figures, dtype=torch.float64)
        outputs = [torch.empty_like(own) for _ in range(self.world)]
        self.transport.all_gather(outputs, own, tuple(range(self.world))).wait()
        return [output.tolist() for output in outputs]

    def buffers(self, numel: int, count: int) -> list[Tensor]:
        """Tensors to receive in, reused: first touching new memory would be timed too."""
        if len(self._buffers) < count or self._buffers[0].numel() != numel:
            self._buffers = [torch.ones(numel, device=self.device) for _ in range(count)]
        return self._buffers[:count]

    def settle(self) -> None:
        """Wait until the GPU of this rank is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def midmean(values: Sequence[float]) -> float:
    """The mean of the middle half; of three values the median."""
    ordered, cut = sorted(values), max(len(values) // 4, int(len(values) == 3))
    half = ordered[cut : len(ordered) - cut]
    return sum(half) / len(half)
