"""Start a generated build under torchrun: `torchrun --nproc-per-node 4 build/launch.py --steps 3`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from .distributed import init
from .loader import load_rank
from .rank import Rank
from .transport import LaunchError, PeerLost
from .worker import OptimizerFactory, Worker


def main(script: str, world: int, optimizer: OptimizerFactory) -> None:
    """Train the build that `script` lies in, and print the loss of every step on rank 0."""
    parser = argparse.ArgumentParser(prog="launch.py", description=f"Train this build on {world} ranks, under torchrun.")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    parser.add_argument("--data", metavar="MODULE:FUNCTION", help="batches of a rank; synthetic ones without it")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of synthetic data (default 0)")
    parser.add_argument("--backend", help="gloo or nccl; by default nccl with a GPU for each rank")
    parser.add_argument("--save", metavar="FILE", help="write the trained model's state_dict there")
    args = parser.parse_args()
    guarded(lambda: _train(Path(script).parent, world, optimizer, args))


def guarded(run: Callable[[], None]) -> None:
    """Run a rank so that the error which started a failure is shown first, and nothing is left running.

    A rank that lost a peer waits a moment before it leaves: the peer's own error is printed by then.
    """
    try:
        record(run)()
    except LaunchError as error:
        _leave(f"error: {error}", 0.0)
    except PeerLost as error:
        _leave(f"rank {os.environ.get('RANK', '?')} stops: {error}\n  (the error of the rank that failed first stands above)", 2.0)
    except BaseException:
        _leave(f"rank {os.environ.get('RANK', '?')} failed:\n{traceback.format_exc()}", 0.0)


def _leave(message: str, delay: float) -> None:
    time.sleep(delay)
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)  # a poisoned process group may block an ordinary exit


def load_weights(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """(tensors by name, keys of the model's state_dict) of a build's weights.pt."""
    path = folder / "weights.pt"
    if not path.exists():
        raise LaunchError(f"{path.name} is missing beside launch.py; compile the model again")
    saved = torch.load(path, weights_only=True, mmap=True)
    return {**saved["state"], **saved["extra"]}, list(saved["state"])


def open_worker(folder: Path, world: int, optimizer: OptimizerFactory, seed: int = 0, backend: str | None = None) -> Worker:
    """This process's worker of the build in `folder`."""
    transport = init(world, backend)
    weights, keys = load_weights(folder)
    return Worker(load_rank(folder, transport.rank), transport, weights, keys, optimizer, seed=seed)


def _train(folder: Path, world: int, optimizer: OptimizerFactory, args: argparse.Namespace) -> None:
    worker = open_worker(folder, world, optimizer, args.seed, args.backend)
    batches = iter(_loaded(args.data, worker) if args.data else synthetic(worker.rank, args.seed))
    begin = time.perf_counter()
    for step in range(args.steps):
        batch = next(batches, None)
        if batch is None:
            raise LaunchError(f"the data ended after {step} of {args.steps} steps")
        loss = worker.step(*batch)
        if worker.rank.index == 0:
            now = time.perf_counter()
            print(f"step {step + 1}  loss {loss.item():.6f}  {now - begin:.3f} s", flush=True)
            begin = now
    if args.save:
        state = worker.state_dict()
        if state is not None:
            torch.save(state, args.save)
    worker.rank.transport.close()


def _loaded(name: str, worker: Worker) -> Iterable[tuple[Tensor, ...]]:
    module, _, function = name.partition(":")
    if not function:
        raise LaunchError(f"--data {name}: write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        make: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise LaunchError(f"--data {name}: {error}") from error
    return make(worker)  # type: ignore[no-any-return]


def synthetic(rank: Rank, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Endless random batches of this rank's part; () on ranks that read no data."""
    generator = torch.Generator().manual_seed(seed * rank.world + rank.index)
    first, last = rank.examples
    while True:
        batch = []
        for shape, dtype, high in rank.inputs.values():
            sizes = [last - first if n == -1 else n for n in shape]
            kind = getattr(torch, dtype)
            batch.append(torch.randn(sizes, dtype=kind, generator=generator) if high is None else
                         torch.randint(0, high, sizes, dtype=kind, generator=generator))
        yield tuple(batch)
