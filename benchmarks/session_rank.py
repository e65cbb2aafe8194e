"""One rank of a `Session`: joins the others once, then does what the parent tells it, until it is told to stop.

    load       open a build's worker on the transport that is there
    run        some steps to warm up, and some that count
    unload     forget a worker
    calibrate  measure the devices and links of the ranks
    stop       leave

Every rank gets the same commands in the same order, so what is collective in them meets.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lockstep import Marks
from splitc.cost_models.calibration.calibrate import calibrate
from splitc.ir.cluster_file import to_toml
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.main import load_worker
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.distributed import init


def sgd(parameters: Iterable[Any], rate: float = 1e-3, momentum: float = 0.9) -> torch.optim.Optimizer:
    """What everything trains with.  parameters: with their names or without."""
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)


@dataclass(frozen=True)
class Training:
    """What `run` trains.  batch: this rank's, again and again.  sent: payload bytes so far.  leave: end what runs."""

    step: Callable[..., object]
    batch: tuple[Tensor, ...]
    sent: Callable[[], float] = lambda: 0.0
    leave: Callable[[], None] = lambda: None


class SessionRank:
    """What a rank has at hand between commands."""

    def __init__(self, transport: Transport, progress: Callable[[str], None]) -> None:
        self._transport, self._progress = transport, progress
        self._images, self._kernels = torch.ones(16, 16, 64, 64), torch.ones(16, 16, 3, 3)
        self._trainings: dict[str, Training] = {}

    def load(self, name: str, folder: str, momentum: float = 0.9) -> dict[str, Any]:
        """Open the worker of the build in `folder`, and draw the one batch that it will see again and again."""
        worker = load_worker(Path(folder), self._transport, partial(sgd, momentum=momentum))
        batch = next(synthetic(worker.rank.spec))
        self._trainings[name] = Training(worker.step, batch, lambda: worker.rank.sent_bytes, worker.end_round)
        return {}

    def run(self, name: str, steps: int, warm_up: int, apart: bool) -> dict[str, Any]:
        """Train `warm_up` and `steps` steps; apart: with a barrier before each.

        begins, ends: the clock around each step that counts (s); it is the same for all ranks of a machine.
        sent: payload bytes and processor: this process's seconds on processors, over all of them.  pace: processor
        seconds of a fixed piece of work, before or after, whichever was slower.
        """
        training = self._trainings[name]
        begins, ends = [], []
        before = self._pace()
        self._transport.barrier()
        for _ in range(warm_up):
            training.step(*training.batch)
        sent, used = training.sent(), time.process_time()
        for _ in range(steps):
            if apart:
                self._transport.barrier()
            begins.append(time.perf_counter())
            training.step(*training.batch)
            ends.append(time.perf_counter())
        used = time.process_time() - used
        sent = training.sent() - sent
        return {"begins": begins, "ends": ends, "sent": sent, "processor": used, "pace": max(before, self._pace())}

    def _pace(self) -> float:
        """Seconds of a convolution and a pooling of images that no cache of a core holds, the median of some."""

        def once() -> float:
            begin = time.thread_time()
            torch.max_pool2d(torch.conv2d(self._images, self._kernels, padding=1), 2)
            return time.thread_time() - begin

        return statistics.median(once() for _ in range(5))

    def unload(self, name: str) -> dict[str, Any]:
        """Forget the worker of a build, after its round; the connections stay."""
        self._trainings.pop(name).leave()
        gc.collect()
        return {}

    def calibrate(self, budget: float) -> dict[str, Any]:
        """The cluster that the ranks are, as TOML, and what its numbers miss."""
        measured = calibrate(self._transport, budget, self._progress, separate=True)
        return {"cluster": to_toml(measured.cluster), "residuals": [asdict(each) for each in measured.residuals]}


def serve(make: Callable[[Transport, Callable[[str], None]], object]) -> None:
    """Join the ranks and carry out commands: each is a method of what `make` returns, and says what that returns."""
    marks = Marks()
    torch.set_num_threads(1)
    transport = init(backend="gloo", device="cpu")
    rank = make(transport, marks.progress)
    marks.tell("ready")
    while (command := marks.ask())["do"] != "stop":
        do = command.pop("do")
        marks.tell(do, **getattr(rank, do)(**command))
    transport.close()


if __name__ == "__main__":
    guarded(lambda: serve(SessionRank))
