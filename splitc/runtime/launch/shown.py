"""What a run shows of its steps: one line that renews itself on a terminal, elsewhere lines, in long runs few."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from ..progress import Line
from ..worker import Worker
from .feed import Batches

_FIRST, _PATIENCE = 100, 10.0  # steps that all have a line, off a terminal; then seconds between two
_MEAN = 20  # steps


class Losses:
    """The losses of a run as numbers: on rank 0 (step, loss) of each step once; nothing on the others.

    On a GPU they are those of the step before, so that it always has work.
    """

    def __init__(self, worker: Worker) -> None:
        self._is_first = worker.rank.index == 0
        self._waiting: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def __call__(self, step: int, loss: Tensor, now: bool = False) -> Iterator[tuple[int, float]]:
        """Take the loss of a step; gives those that are known.  now: also this one, which a GPU is waited for."""
        on_gpu = loss.device.type == "cuda"
        if self._is_first:
            copied = loss.detach().to("cpu", non_blocking=True)  # into pinned memory
            event = torch.cuda.current_stream(loss.device).record_event() if on_gpu else None
            self._waiting.append((step, copied, event))
        while len(self._waiting) > (on_gpu and not now):
            made, copied, event = self._waiting.pop(0)
            if event is not None:
                event.synchronize()
            yield made, copied.item()


class Shown:
    """Shows the steps of a run, on rank 0."""

    def __init__(self, worker: Worker, batches: Batches, args: argparse.Namespace) -> None:
        self._line = Line(sys.stdout, _PATIENCE) if worker.rank.index == 0 else None
        self._worker, self._batches, self._every = worker, batches, args.log_every
        self._begin, self._seconds, self._number = time.perf_counter(), 0.0, count()

    def __call__(self, step: int, loss: float) -> None:
        """Show a step whose loss is known."""
        now, number = time.perf_counter(), next(self._number)
        seconds, self._begin = now - self._begin, now
        if number:  # the first one warms up
            self._seconds += (seconds - self._seconds) / min(number, _MEAN)
        if self._line is None:
            return
        text = f"step {step}  loss {loss:.6f}  {seconds:.3f} s{self._pace(step) if number else ''}"
        every = self._every or (0 if self._line.renews or number >= _FIRST else 1)
        if step == len(self._batches) or (every and step % every == 0):
            self._line.keep(text)
        elif self._line.renews or not self._every:
            self._line.show(text)

    def say(self, text: str) -> None:
        """Print a line; what came before it is not part of the next step."""
        if self._line is not None:
            self._line.keep(text)
        self._begin = time.perf_counter()

    def _pace(self, step: int) -> str:
        rate = self._worker.batch_offsets[-1] / self._seconds
        left = (len(self._batches) - step) * self._seconds
        ends = f"  {_duration(left)} left" if left else ""
        return f"  {rate:.{0 if rate >= 100 else 1}f} samples/s{self._batches.epoch}{ends}"


def _duration(seconds: float) -> str:
    """`12 s`, `12 min`, `12.0 h`."""
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
