"""The three trainings of the demo.  torchrun starts this module on each rank of DDP and of splitc.

Initial weights, optimizer and batches are the same in all; they differ only in which rank computes what and in how
gradients are summed.  Each process computes on one CPU thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from splitc.cli.examples.demo.model import GLOBAL_BATCH, SEED, WORLD, Digits, loss, model
from splitc.cost_models.compute.clocks import threads
from splitc.runtime.data import order
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.launch.main import load_weights
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.distributed import init
from splitc.runtime.worker import Worker

Batches = Callable[[int], Iterable[tuple[Tensor, ...]]]
"""The batches of an epoch."""


@dataclass
class Training:
    """The result of a training.

    losses: of every step.  seconds: of the median step.  sent_bytes: of every rank, in one step.
    state: the state_dict of the whole model.
    """

    losses: list[float]
    seconds: float
    sent_bytes: list[float]
    state: dict[str, Tensor]

    def save(self, path: Path) -> None:
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Training:
        return cls(**torch.load(path, weights_only=True))


def sgd(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all three trainings."""
    return torch.optim.SGD(params, lr=0.03, momentum=0.85)


def train_alone(train: TensorDataset, epochs: int) -> Training:
    """Train in this process, on whole batches."""
    digits = model()
    with threads(1):
        losses, seconds = run(lambda epoch: own_batches(train, epoch), _step_of(digits), epochs, verbose=True)
    return Training(losses, seconds, [0.0], whole_state(digits))


def _step_of(digits: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step of a model, as one writes it in torch."""
    optimizer = sgd(digits.parameters())

    def step(images: Tensor, classes: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(digits(images), classes)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def train_ddp(transport: Transport, folder: Path, train: TensorDataset, epochs: int) -> Training:
    """Train as one rank of DistributedDataParallel, on this rank's part of every batch."""
    digits = Digits()
    digits.load_state_dict(load_weights(folder / "build")[0])
    own_step = _step_of(DistributedDataParallel(digits))

    def step(images: Tensor, classes: Tensor) -> Tensor:
        value = own_step(images, classes) / transport.world
        dist.all_reduce(value)
        return value

    def batches(epoch: int) -> Iterator[tuple[Tensor, ...]]:
        return own_batches(train, epoch, transport.rank, transport.world)

    losses, seconds = run(batches, step, epochs, verbose=transport.rank == 0)
    sent = ring_bytes(digits, transport.world)
    return Training(losses, seconds, [sent] * transport.world, whole_state(digits))


def train_splitc(transport: Transport, folder: Path, train: TensorDataset, epochs: int) -> Training:
    """Train as one rank of the generated scripts.  The state is whole on rank 0, empty elsewhere."""
    weights, keys = load_weights(folder / "build")
    worker = Worker(load_rank(folder / "build", transport.rank), transport, weights, keys, sgd)
    before = worker.rank.sent_bytes
    losses, seconds = run(
        lambda epoch: worker.shard(train, seed=SEED, epoch=epoch), worker.step, epochs, verbose=transport.rank == 0
    )
    sent = transport.gather_objects((worker.rank.sent_bytes - before) / len(losses)) or []
    return Training(losses, seconds, sent, worker.state_dict() or {})


def run(batches: Batches, step: Callable[..., Tensor], epochs: int, verbose: bool) -> tuple[list[float], float]:
    """The losses of all steps and the median seconds of one.  verbose: print a line for each epoch."""
    losses: list[float] = []
    seconds: list[float] = []
    for epoch in range(epochs):
        epoch_begin, first = time.perf_counter(), len(losses)
        for batch in batches(epoch):
            begin = time.perf_counter()
            losses.append(float(step(*batch)))
            seconds.append(time.perf_counter() - begin)
        if verbose:
            mean, passed = sum(losses[first:]) / len(losses[first:]), time.perf_counter() - epoch_begin
            print(f"  epoch {epoch + 1} of {epochs}  mean loss {mean:.4f}  {passed:4.1f} s", flush=True)
    return losses, median(seconds)


def own_batches(train: TensorDataset, epoch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, ...]]:
    """The equal part of rank `rank` of every batch of an epoch, in the order of `worker.shard`."""
    size = GLOBAL_BATCH // world
    indices = order(len(train), shuffle=True, seed=SEED, epoch=epoch)
    for start in range(0, len(train) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
        yield train[indices[start + rank * size : start + (rank + 1) * size]]


def ring_bytes(digits: nn.Module, world: int) -> float:
    """Bytes that each of `world` ranks sends in a ring all-reduce of the gradients: 2 (n - 1) / n of their bytes."""
    return 2 * (world - 1) / world * sum(p.nbytes for p in digits.parameters())


def whole_state(digits: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in digits.state_dict().items()}


def _main() -> None:
    parser = argparse.ArgumentParser(description="one rank of the demo's trainings; started by torchrun")
    parser.add_argument("way", choices=("ddp", "splitc"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = init(WORLD, device="cpu")
    train = TensorDataset(*torch.load(args.folder / "digits.pt", weights_only=True))
    one_rank = train_ddp if args.way == "ddp" else train_splitc
    training = one_rank(transport, args.folder, train, args.epochs)
    if transport.rank == 0:
        training.save(args.folder / f"{args.way}.pt")
    transport.close()


if __name__ == "__main__":
    guarded(_main)
