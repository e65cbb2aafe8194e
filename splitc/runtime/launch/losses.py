"""The losses of a run as numbers: on a GPU those of the step before, so that it always has work."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..worker import Worker


class Losses:
    """On rank 0 (step, loss) of each step once; nothing on the others."""

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
