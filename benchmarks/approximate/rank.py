"""One rank of a campaign: it opens a curve's trainer, trains some steps of it, hands over the weights, and so on.

pace       seconds that a step computes, without communication
open       a trainer with the weights of a seed
train      the next steps of the curve
weights    write the whole model's weights to a file
close      forget the trainer
calibrate  as in `session_rank`
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.approximate.data import Data
from benchmarks.approximate.tasks import TASKS, batch_indices
from benchmarks.approximate.trainers import ByDdp, BySplitc, Trainer
from benchmarks.session_rank import SessionRank, serve
from splitc.runtime.launch.failures import guarded

WARM_UP = 3  # steps before those that `pace` times


class CurveRank(SessionRank):
    """What a rank has at hand between commands."""

    def pace(self, task: str, data: str, steps: int) -> dict[str, Any]:
        """Median seconds of forward and backward of this rank's part of a batch, all ranks at once."""
        chosen, examples = TASKS[task], Data.load(Path(data))
        model = chosen.model()
        part = chosen.batch // self._transport.world
        inputs, labels = examples.inputs[:part], examples.labels[:part]
        times = []
        self._transport.barrier()
        for _ in range(WARM_UP + steps):
            begin = time.perf_counter()
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            times.append(time.perf_counter() - begin)
        return {"seconds": statistics.median(times[WARM_UP:])}

    def open(self, task: str, data: str, folder: str | None, rate: float, seed: int) -> dict[str, Any]:
        """Make the trainer of a curve: of the build in `folder`, or DistributedDataParallel without one."""
        self._task, self._seed, self._done = TASKS[task], seed, 0
        self._examples = Data.load(Path(data))
        if folder is None:
            self._trainer: Trainer = ByDdp(self._task, self._examples, rate, seed)
        else:
            build, transport = Path(folder), self._transport
            self._trainer = BySplitc(self._task, self._examples, build, transport, rate, seed)
        return {}

    def train(self, steps: int) -> dict[str, Any]:
        """Train the next steps.  begin, end: the clock (s); it is the same for all ranks of a machine."""
        indices = [
            batch_indices(len(self._examples.labels), self._task.batch, self._done + k, self._seed)
            for k in range(steps)
        ]
        self._transport.barrier()
        begin = time.perf_counter()
        for each in indices:
            self._trainer.step(each)
        end = time.perf_counter()
        self._transport.barrier()
        self._done += steps
        return {"begin": begin, "end": end}

    def weights(self, file: str) -> dict[str, Any]:
        """Write the weights that the ranks have now, from rank 0."""
        state = self._trainer.state()
        if state is not None:
            torch.save(state, file)
        return {}

    def close(self) -> dict[str, Any]:
        """Forget the trainer; the connections stay."""
        del self._trainer
        gc.collect()
        return {}


if __name__ == "__main__":
    guarded(lambda: serve(CurveRank))
