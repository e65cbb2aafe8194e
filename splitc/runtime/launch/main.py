"""What a generated `launch.py` calls: options, this rank's worker, its batches, and the measuring of steps."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import as_tuple
from ..errors import LaunchError
from ..optimizers import OptimizerFactory
from ..spec import RankSpec
from ..transport.base import Transport
from ..transport.distributed import init
from ..transport.phases import WARM_UP, report, write
from ..transport.recorder import Recorder
from ..weights import first_names
from ..worker import Worker
from .failures import guarded
from .loader import load_rank, require_one_build


def main(train: Callable[[argparse.Namespace], None], world: int) -> None:
    """Call `train` with the options of the command line; print its error and end this process when it fails."""
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
    guarded(lambda: train(args))


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


@contextmanager
def open_worker(script: str, world: int, optimizer: OptimizerFactory, args: argparse.Namespace) -> Iterator[Worker]:
    """This process's worker of the build that `script` lies in; on leaving, its measurements are written.

    Raises LaunchError when the options do not fit the build, or the ranks do not find each other.
    """
    folder = Path(script).resolve().parent
    _check_options(folder, args)
    transport = init(world, args.backend)
    require_one_build(folder, transport)
    worker = load_worker(folder, transport if args.measure is None else Recorder(transport), optimizer, args.seed)
    yield worker
    worker.close()
    if isinstance(worker, MeasuredWorker):
        all_steps = transport.gather_objects(worker.recorder.steps)
        if all_steps is not None:
            write(report(all_steps, worker.examples, {"device": str(transport.device)}), args.measure)
    transport.close()


def load_worker(folder: Path, transport: Transport, optimizer: OptimizerFactory, seed: int = 0) -> Worker:
    """This rank's worker of the build in `folder`; it is measured where `transport` is a Recorder."""
    weights, keys = load_weights(folder)
    program = load_rank(folder, transport.rank)
    if isinstance(transport, Recorder):
        return MeasuredWorker(program, transport, weights, keys, optimizer, seed=seed)
    return Worker(program, transport, weights, keys, optimizer, seed=seed)


def _check_options(folder: Path, args: argparse.Namespace) -> None:
    if args.save is not None and (not args.save.parent.is_dir() or args.save.resolve() == folder / "weights.pt"):
        raise LaunchError(f"--save {args.save}: name another file, in a folder that exists")
    if args.measure is not None and not args.measure.absolute().parent.is_dir():
        raise LaunchError(f"--measure {args.measure}: there is no folder {args.measure.absolute().parent}")
    if args.measure is not None and args.steps <= WARM_UP:
        raise LaunchError(f"--measure leaves out the first {WARM_UP} steps; give --steps {WARM_UP + 1} or more")


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


def batches(worker: Worker, args: argparse.Namespace) -> Iterator[tuple[Tensor, ...]]:
    """This rank's batches of `args.steps` steps: those of `--data`, or synthetic ones.

    Iterating raises LaunchError when the data end early.
    """
    source = given(args.data, worker) if args.data else synthetic(worker.rank.spec, args.seed)
    if isinstance(worker, MeasuredWorker):
        source = source if args.data else repeat(next(source))
        worker.recorder.align()
    return _counted(source, args.steps, worker.rank.index)


def _counted(source: Iterator[tuple[Tensor, ...]], steps: int, rank: int) -> Iterator[tuple[Tensor, ...]]:
    for step in range(steps):
        try:
            batch = next(source)
        except StopIteration:
            raise LaunchError(f"the data of rank {rank} ended after {step} of {steps} steps") from None
        yield batch


def given(name: str, worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """The batches of the user's `module:function`; on ranks that read no data each of them is replaced by ().

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
    reads, paths = worker.data_rank is not None, worker.rank.spec.paths
    return (as_tuple(batch, paths) if reads else () for batch in make(worker))


def synthetic(rank: RankSpec, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Endless random batches for this rank, as large as compiled; () on ranks that read no data."""
    generator = torch.Generator().manual_seed(seed * rank.world + rank.index)
    reader = rank.data_rank or 0
    first, last = rank.batch_offsets[reader], rank.batch_offsets[min(reader + 1, len(rank.batch_offsets) - 1)]

    def draw(shape: tuple[int, ...], dtype: torch.dtype, high: int | None) -> Tensor:
        sizes = [last - first if n == -1 else n for n in shape]
        if high is None and (dtype.is_floating_point or dtype.is_complex):
            return torch.randn(sizes, dtype=dtype, generator=generator)
        return torch.randint(0, 2 if high is None else high, sizes, generator=generator).to(dtype)

    while True:
        yield tuple(draw(i.shape, getattr(torch, i.dtype), i.high) for i in rank.inputs.values())
