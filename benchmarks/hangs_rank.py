"""One rank of a training that hangs on purpose, in the way that its arguments say.

torchrun --nproc-per-node 4 -m benchmarks.hangs_rank BUILD KIND RANK STEP
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import Dataset

from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.main import open_worker
from splitc.runtime.launch.options import add_options, use_checkpoints
from splitc.runtime.worker import Worker

STEPS = 60
Example = tuple[Tensor, Tensor]


class Digits(Dataset[Example]):
    """Examples, of which one never comes where `stuck` says so."""

    def __init__(self, number: int, stuck: int | None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(number, 64, generator=generator)
        self.targets = torch.randint(0, 10, (number,), generator=generator)
        self.read, self.stuck = 0, stuck

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Example:
        self.read += 1
        if self.stuck is not None and self.read > self.stuck:
            print("planted", flush=True)
            while True:
                pass
        return self.inputs[index], self.targets[index]


def sgd(params: list[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def train(build: Path, kind: str, rank: int, at: int) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    args = parser.parse_args(["--backend", "gloo", "--device", "cpu"])
    args.measure = None
    use_checkpoints(args, restarts=0)
    script, world = str(build / "launch.py"), int(os.environ["WORLD_SIZE"])
    with open_worker(script, world, sgd, args) as worker:
        loop(worker, kind if worker.rank.index == rank else "", at)


def loop(worker: Worker, kind: str, at: int) -> None:
    offsets = worker.rank.spec.batch_offsets
    own = 0 if worker.data_rank is None else offsets[worker.data_rank + 1] - offsets[worker.data_rank]
    loader = worker.loader(Digits(STEPS * offsets[-1], at * own if kind == "loop" else None))
    for step, batch in enumerate(loader, 1):
        if kind == "cut" and step == at:
            print("planted", flush=True)  # and the cable is pulled meanwhile
            time.sleep(2.0)
        if kind == "skip" and step == at:
            print("planted", flush=True)
            continue
        if kind == "stop" and step == at:
            print("planted", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        worker.step(*batch)
        if worker.rank.index == 0:
            print(f"step {step}", flush=True)
        if kind == "skip evaluate" and step == at:
            print("planted", flush=True)
        elif step % 10 == 0:
            worker.evaluate(*batch)
        if step % 30 == 0:
            worker.state_dict()
    worker.state_dict()


if __name__ == "__main__":
    folder, what, who, when = sys.argv[1:]
    guarded(lambda: train(Path(folder), what, int(who), int(when)))
