"""What the processes of test_launch run: a model, its data, data that goes wrong, and a program that trains."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, get_worker_info

import splitc
from splitc.compiled import CompiledProgram
from splitc.deferred import DeferredWorker
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER, compiled
from tests.support.ranks import sgd

WORLD, BATCH = 2, 4
SEPARATION = "layer_separation(n_c=1, n_f=1)"
PIDS = "LAUNCHED_PIDS"  # names the folder in which every process leaves its number


class Perceptron(nn.Module):
    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second, self.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Examples(TensorDataset):
    """16 examples; whoever reads one leaves its process number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        super().__init__(torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator))

    def __getitem__(self, k: int | slice) -> tuple[Tensor, ...]:
        if get_worker_info() is not None:
            note_pid()
        values: tuple[Tensor, ...] = super().__getitem__(k)  # type: ignore[no-untyped-call]
        return values


@cache
def program(strategy: str = SEPARATION, world: int = WORLD) -> CompiledProgram:
    """The perceptron, once for all tests that change nothing in it."""
    x, y = Examples()[:BATCH]
    return compiled(Perceptron(), (x,), y, F.cross_entropy, world, strategy)


def note_pid() -> None:
    if PIDS in os.environ:
        (Path(os.environ[PIDS]) / str(os.getpid())).touch()


def batches(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """The examples in order, again and again."""
    for epoch in count():
        yield from worker.shard(Examples(), shuffle=False, epoch=epoch)


def interrupted(worker: Worker, interrupt: Callable[[], None]) -> Iterator[tuple[Tensor, ...]]:
    note_pid()
    for step, batch in enumerate(worker.shard(Examples(), num_workers=1)):
        if step == 2 and worker.rank.index == 1:
            interrupt()
        yield batch


def failing(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    def fail() -> None:
        raise ValueError("rank 1 has had enough")

    return interrupted(worker, fail)


def late(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """The rank that reads the data stops for longer than the others wait."""
    for step, batch in enumerate(batches(worker)):
        if step == 3 and worker.data_rank is not None:
            time.sleep(60)
        yield batch


def killed(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    return interrupted(worker, lambda: os.kill(os.getpid(), signal.SIGKILL))


def killed_once(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """Rank 1 is killed after its second step, in the first start of a run; the others find a file."""

    def kill() -> None:
        mark = Path(os.environ["KILLED_ONCE"])
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return interrupted(worker, kill)


def main(folder: Path) -> None:
    """Train by a worker of a compiled program, then by one that compiles on its first batch; keep what rank 0 saw."""
    model = Perceptron(seed=5 + int(os.environ["RANK"]))  # rank 0's weights count
    x, y = Examples()[:BATCH]
    made = splitc.compile(model, WORLD, (x,), y, F.cross_entropy, strategy=SEPARATION, cluster=CLUSTER)
    first = made.worker(sgd)
    train(first, folder / "compiled.pt", BATCH)
    deferred = splitc.compile(model, WORLD, loss=F.cross_entropy, strategy=SEPARATION, cluster=CLUSTER)
    second = deferred.worker(sgd)
    train(second, folder / "deferred.pt", BATCH)
    for worker in (second, first):
        worker.rank.transport.close()
    # A thread of gloo that outlives the interpreter may abort it.
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [name for name in threads if "gloo" in name], threads


def train(worker: Worker | DeferredWorker, path: Path, batch: int) -> None:
    losses = []
    for part in worker.shard(Examples(), batch, shuffle=False):
        losses.append(float(worker.step(*part)))
        worker.save(path.with_suffix(""), asynchronous=True)
    state = worker.state_dict()
    worker.load_state_dict(state and {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert worker.resume(path.with_suffix("")) == len(losses)
    state = worker.state_dict()
    if state is not None:
        torch.save({**state, "losses": torch.tensor(losses, dtype=torch.float64)}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
