"""One rank of `wire_bytes`: trains a build on synthetic batches, and stops before and after the steps that count."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.lockstep import Marks
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.main import load_worker
from splitc.runtime.transport.distributed import init

WARM_UP = 2  # steps, or rounds; connections are made and buffers found in the first, and the optimizer's state


def train(folder: Path, world: int, steps: int) -> None:
    """Train `steps` steps between the marks `warm` and `done`."""
    marks = Marks()
    worker = load_worker(folder, init(world), lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9))
    batches = synthetic(worker.rank.spec)
    rounds = worker.rank.spec.rounds
    for _ in range(WARM_UP * (rounds.steps if rounds else 1)):
        worker.step(*next(batches))
    marks.reach("warm", sent=worker.rank.sent_bytes)
    for _ in range(steps):
        worker.step(*next(batches))
    marks.reach("done", sent=worker.rank.sent_bytes)
    worker.rank.transport.close()


def _main() -> None:
    parser = argparse.ArgumentParser(description="one rank of wire_bytes, which starts it")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    guarded(lambda: train(args.folder, args.world, args.steps))


if __name__ == "__main__":
    _main()
