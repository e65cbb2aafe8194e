"""Start a generated build under torchrun: `torchrun --nproc-per-node 4 build/launch.py --steps 3`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from ..data import as_tuple
from ..errors import LaunchError
from ..rank import Rank
from ..transport.base import PeerLost, Transport
from ..transport.distributed import init
from ..transport.phases import WARM_UP, report, write
from ..transport.recorder import Recorder
from ..weights import first_names
from ..worker import OptimizerFactory, Worker
from .loader import load_rank


def main(script: str, world: int, optimizer: OptimizerFactory) -> None:
    """Train the build that `script` lies in, and print the loss of every step on rank 0."""
    parser = argparse.ArgumentParser(prog="launch.py", description=f"Train this build on {world} ranks of torchrun.")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    parser.add_argument("--data", metavar="MODULE:FUNCTION", help="batches of a rank; synthetic ones without it")
    parser.add_argument("--seed", type=int, default=0, help="seed of dropout and of synthetic data (default 0)")
    parser.add_argument("--backend", help="gloo or nccl; by default nccl with a GPU for each rank")
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the trained model's state_dict there")
    parser.add_argument(
        "--measure",
        metavar="FILE",
        type=Path,
        help=f"record every step's phases after {WARM_UP} of warm-up, and write them there as JSON; without --data one "
        "batch is used again and again",
    )
    args = parser.parse_args()
    guarded(lambda: _train(Path(script).resolve().parent, world, optimizer, args))


def guarded(run: Callable[[], None]) -> None:
    """Run a rank so that the error which started a failure is shown first, and nothing is left running.

    A rank that lost a peer waits a moment before it leaves: the peer's own error is printed by then.  torchrun is told
    the errors of the ranks that failed by themselves, and stops the others.
    """
    rank = os.environ.get("RANK", "?")

    def peers_apart() -> PeerLost | None:
        try:
            run()
        except PeerLost as error:
            return error
        return None

    try:
        lost = record(peers_apart)()
    except LaunchError as error:
        _leave(f"error: {error}")
    except BaseException:
        _leave(f"rank {rank} failed:\n{traceback.format_exc()}")
    if lost is not None:
        time.sleep(2.0)
        _leave(f"rank {rank} stops: {lost}\n  (the error of the rank that failed first stands above)")


def _leave(message: str) -> NoReturn:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)  # a poisoned process group may block an ordinary exit


def load_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A build's tensors by name, read when they are used, and its model's keys with their `first_names`.

    Raises LaunchError when the folder has no weights.pt of a build.
    """
    path = folder / "weights.pt"
    if not path.exists():
        raise LaunchError(f"{path.name} is missing beside launch.py; compile the model again")
    saved = torch.load(path, weights_only=True, mmap=True)
    if not {"state", "extra"} <= saved.keys():
        raise LaunchError(f"{path.name} is not what splitc wrote; compile the model again")
    return {**saved["state"], **saved["extra"]}, first_names(saved["state"])


def open_worker(
    folder: Path, world: int, optimizer: OptimizerFactory, seed: int = 0, backend: str | None = None
) -> Worker:
    """This process's worker of the build in `folder`."""
    return _worker(folder, init(world, backend), optimizer, seed)


def _worker(folder: Path, transport: Transport, optimizer: OptimizerFactory, seed: int) -> Worker:
    weights, keys = load_weights(folder)
    return Worker(load_rank(folder, transport.rank), transport, weights, keys, optimizer, seed=seed)


def _train(folder: Path, world: int, optimizer: OptimizerFactory, args: argparse.Namespace) -> None:
    if args.save is not None and (not args.save.parent.is_dir() or args.save.resolve() == folder / "weights.pt"):
        raise LaunchError(f"--save {args.save}: name another file, in a folder that exists")
    if args.measure is not None and not args.measure.absolute().parent.is_dir():
        raise LaunchError(f"--measure {args.measure}: there is no folder {args.measure.absolute().parent}")
    if args.measure is not None and args.steps <= WARM_UP:
        raise LaunchError(f"--measure leaves out the first {WARM_UP} steps; give --steps {WARM_UP + 1} or more")
    transport = init(world, args.backend)
    recorder = Recorder(transport) if args.measure is not None else None
    worker = _worker(folder, recorder or transport, optimizer, args.seed)
    batches = given(args.data, worker) if args.data else synthetic(worker.rank, args.seed)
    if recorder is not None:
        batches = batches if args.data else repeat(next(batches))
        recorder.align()
    examples: list[int] = []
    begin = time.perf_counter()
    for step in range(args.steps):
        try:
            batch = next(batches)
        except StopIteration:
            raise LaunchError(
                f"the data of rank {worker.rank.index} ended after {step} of {args.steps} steps"
            ) from None
        with recorder.step() if recorder is not None else nullcontext():
            loss = worker.step(*batch)
        examples.append(worker.rank.step_offsets[-1])
        if worker.rank.index == 0:
            value, now = loss.item(), time.perf_counter()
            print(f"step {step + 1}  loss {value:.6f}  {now - begin:.3f} s", flush=True)
            begin = now
    if recorder is not None:
        everyones = transport.gather_objects(recorder.steps)
        if everyones is not None:
            write(report(everyones, examples, {"device": str(transport.device)}), args.measure)
    if args.save is not None:
        save(worker.state_dict(), args.save)
    transport.close()


def save(state: dict[str, Tensor] | None, path: Path) -> None:
    """Write a state_dict as a whole or not at all; None, as ranks other than 0 have it, writes nothing."""
    if state is not None:
        partial = path.with_name(f"{path.name}.partial")
        torch.save(state, partial)
        partial.replace(path)


def given(name: str, worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """The batches of the user's `module:function`; on ranks that read no data what it gives only counts the steps.

    Raises LaunchError when there is no such function.
    """
    module, _, function = name.partition(":")
    if not function:
        raise LaunchError(f"--data {name}: write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        make: Any = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise LaunchError(f"--data {name}: {error}") from error
    if make is None:
        raise LaunchError(f"--data {name}: {module} has no {function}")
    reads, names = worker.data_rank is not None, list(worker.rank.inputs)
    return (as_tuple(batch, names) if reads else () for batch in make(worker))


def synthetic(rank: Rank, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Endless random batches of this rank's part; () on ranks that read no data."""
    generator = torch.Generator().manual_seed(seed * rank.world + rank.index)
    reader = rank.data_rank or 0
    first, last = rank.bounds[reader], rank.bounds[min(reader + 1, len(rank.bounds) - 1)]

    def draw(shape: tuple[int, ...], dtype: torch.dtype, high: int | None) -> Tensor:
        sizes = [last - first if n == -1 else n for n in shape]
        if high is None and (dtype.is_floating_point or dtype.is_complex):
            return torch.randn(sizes, dtype=dtype, generator=generator)
        return torch.randint(0, 2 if high is None else high, sizes, generator=generator).to(dtype)

    while True:
        yield tuple(draw(shape, getattr(torch, dtype), high) for shape, dtype, high in rank.inputs.values())
