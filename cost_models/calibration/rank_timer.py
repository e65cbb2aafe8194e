"""Time operations in which several ranks take part.

An operation runs once to warm up, then repeatedly for as long as its budget allows, without barriers: the ranks wait
for each other within it.  The result is the midmean of a rank's runs, the mean of their middle half: other processes
only slow some runs down, and a send that ends in a kernel buffer delays the next one by what it saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from splitc.runtime.transport.base import Transport

Progress = Callable[[str], None]

LEAST, MOST = 3, 400  # timed runs
_FIGURES = 3  # floats that ranks exchange at once


def no_progress(_: str) -> None:
    """Report nothing."""


class RankTimer:
    """Times operations of the ranks of a transport.  Its methods are collective and return the same on all ranks.

    spent: seconds that all timing so far has taken.
    """

    def __init__(self, transport: Transport, progress: Progress = no_progress) -> None:
        self.transport = transport
        self.rank, self.world, self.device = transport.rank, transport.world, transport.device
        self.progress = progress
        self.spent = 0.0
        self._buffers: list[Tensor] = []

    def seconds(self, ranks: Sequence[int], run: Callable[[], object], allowed: float) -> float:
        """Seconds that `run`, an operation of `ranks`, takes the slowest of them; the other ranks wait.

        allowed: budget of all runs (s).
        """

        def timed() -> tuple[float]:
            begin = time.perf_counter()
            run()
            self.settle()
            return (time.perf_counter() - begin,)

        return max(figures[0] for figures in self.figures(ranks, timed, allowed))

    def figures(
        self, ranks: Sequence[int], run: Callable[[], tuple[float, ...]], allowed: float
    ) -> list[tuple[float, ...]]:
        """By rank of `ranks`, the midmeans of the figures that `run` returns, at most two."""
        takes_part = self.rank in ranks
        begin = time.perf_counter()
        if takes_part:
            run()
        took = max(first for first, *_ in self._all_gather_floats(time.perf_counter() - begin if takes_part else 0.0))
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
