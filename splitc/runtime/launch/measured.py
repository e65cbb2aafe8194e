"""A worker whose steps are recorded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..transport.recorder import Recorder
from ..worker import Worker


class MeasuredWorker(Worker):
    """A worker on a `Recorder`, which records every step."""

    def __init__(self, program: Any, transport: Recorder, *arguments: Any, **options: Any) -> None:
        super().__init__(program, transport, *arguments, **options)
        self.recorder = transport
        self.examples: list[int] = []  # of every step, over all readers

    def step(self, *batch: Tensor) -> Tensor:
        with self.recorder.step():
            loss = super().step(*batch)
        self.examples.append(self.batch_offsets[-1])
        return loss
