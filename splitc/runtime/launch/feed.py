"""What a generated `launch.py` trains and evaluates on: the user's data, or synthetic batches."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..data import as_tuple, drawn
from ..errors import MIN_WORLD, LaunchError
from ..loader import Loader
from ..spec import RankSpec
from ..transport.recorder import Recorder
from ..transport.torch_transport import TorchTransport
from ..worker import Worker
from .options import copies_every
from .stopping import Stopping

STEPS = 10  # unless given


class Batches:
    """This rank's batches of a run, after those that the worker was trained on; its length is that of the whole run.

    Iterating raises LaunchError when the data end early, and Stopped where a signal ends the run between two steps.
    """

    def __init__(self, worker: Worker, args: argparse.Namespace) -> None:
        self._worker, self._steps = worker, args.steps or STEPS
        self._source = found(args.data, worker) if args.data else synthetic(worker.rank.spec, args.seed)
        self._is_given, self._loader, self._history = args.data is not None, None, getattr(args, "history", None)
        self._copies, self._args = (0, False), args
        if (within := getattr(args, "neighbour_copy", None)) is not None:
            self._copies = copies_every(within, max(worker.rank.transport.all_gather_objects(worker.cycle[0])))
        if isinstance(self._source, DataLoader) and MIN_WORLD in os.environ:
            raise LaunchError(
                f"--min-world: {args.data} gives a DataLoader, whose batch is that of each reader, so that fewer would "
                f"train on smaller batches; let it give the Dataset"
            )
        if isinstance(self._source, Dataset | DataLoader):
            self._loader = worker.loader(self._source, seed=args.seed)
        self._epochs = args.epochs
        if args.epochs is not None:
            if self._loader is None or isinstance(self._source, IterableDataset):
                raise LaunchError(f"--epochs: what {args.data} gives is no Dataset with a length; give --steps")
            self._steps = args.epochs * len(self._loader)

    def __len__(self) -> int:
        return self._steps

    @property
    def epoch(self) -> str:
        """Where the run is in its dataset, in words; nothing without one."""
        if self._loader is None:
            return ""
        return f"  epoch {self._loader.epoch + 1}{f' of {self._epochs}' if self._epochs else ''}"

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        made, worker, every = self._worker.steps, self._worker, self._copies[0]
        if made >= len(self) and worker.rank.index == 0:
            asked = f"--steps or --epochs asks for {len(self)} in all"
            print(f"nothing to train: {made} steps were made before, and {asked}", flush=True)
        source: Iterator[tuple[Tensor, ...]]
        if self._loader is not None:  # which stands where the checkpoint was made
            source = chain.from_iterable(repeat(self._loader))
        else:
            source = islice(taken(self._source, worker) if self._is_given else self._source, made, None)
        transport = worker.rank.transport
        if isinstance(transport, Recorder):
            source = source if self._is_given else repeat(next(source))
            transport.align()
        stopping = Stopping(transport, made) if isinstance(transport, TorchTransport) else None
        if every and not made and len(self):
            worker.save(self._args.checkpoints, asynchronous=True)  # of the run that copies are of
        with closing(stopping) if stopping is not None else nullcontext():
            for step in range(made, len(self)):
                if every and step > made and step % every == 0:
                    worker.neighbour_copy(self._copies[1])
                if stopping is not None:
                    stopping.before(step + 1, worker.cycle)
                if self._history is not None:
                    self._history.at(step + 1)
                if (batch := next(source, None)) is None:
                    rank = worker.rank.index
                    raise LaunchError(f"the data of rank {rank} ended after {step} of {len(self)} steps")
                yield batch


def evaluation(worker: Worker, args: argparse.Namespace) -> Loader | None:
    """What `--eval-data` gives, each example once an epoch; None without it."""
    if args.eval_data is None:
        return None
    source = found(args.eval_data, worker, "--eval-data")
    if not isinstance(source, Dataset | DataLoader):
        raise LaunchError(f"--eval-data: {args.eval_data} gives a {type(source).__name__}; let it give a Dataset")
    return worker.loader(source, shuffle=False, drop_last=False)


def evaluated(worker: Worker, loader: Loader, args: argparse.Namespace) -> str:
    """`evaluation 0.123456`, the mean loss, with `--accuracy` and `  accuracy 0.9810`.  Collective.

    Raises LaunchError, on every rank, where outputs and targets are no scores and numbers of classes.
    """
    text = f"evaluation {worker.evaluate(loader).item():.6f}"
    if not args.accuracy:
        return text
    counts = [_right(worker.predict(*batch), batch) for batch in loader]
    every = [each for own in worker.rank.transport.all_gather_objects(counts) for each in own]
    if None in every:
        raise LaunchError("--accuracy: the output must be scores of classes, and the last target the class of each")
    right, number = map(sum, zip(*every, strict=True))
    return f"{text}  accuracy {right / max(number, 1):.4f}"


def _right(scores: Any, batch: tuple[Any, ...]) -> tuple[int, int] | None:
    """How many classes have the largest score, and of how many; None where these are no classes."""
    if not batch:
        return 0, 0
    classes = batch[-1]
    if not (isinstance(scores, Tensor) and isinstance(classes, Tensor)) or classes.is_floating_point():
        return None
    for dim in (1, -1):
        if scores.dim() == classes.dim() + 1 and (found := scores.argmax(dim).cpu()).shape == classes.shape:
            known = classes.cpu() >= 0  # below are those that a loss ignores
            return int((found == classes.cpu())[known].sum()), int(known.sum())
    return None


def taken(batches: Iterable[Any], worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """A user's batches; on ranks that read no data each of them is replaced by ()."""
    reads, paths = worker.data_rank is not None, worker.rank.spec.paths
    return (as_tuple(batch, paths) if reads else () for batch in batches)


def found(name: str, given: Any, option: str = "--data") -> Any:
    """What the user's `module:function` gives.  Raises LaunchError when there is no such function."""
    module, _, function = name.partition(":")
    if not function:
        raise LaunchError(f"{option} {name}: write module:function")
    sys.path.insert(0, os.getcwd())
    try:
        make: Any = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise LaunchError(f"{option} {name}: {error}") from error
    if make is None:
        raise LaunchError(f"{option} {name}: {module} has no {function}")
    return make(given)


def synthetic(rank: RankSpec, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Endless random batches for this rank, as large as compiled; () on ranks that read no data."""
    generator = torch.Generator().manual_seed(seed * rank.world + rank.index)
    reader = rank.data_rank or 0
    first, last = rank.batch_offsets[reader], rank.batch_offsets[min(reader + 1, len(rank.batch_offsets) - 1)]

    if any(-2 in each.shape for each in rank.inputs.values()):
        raise LaunchError("a function divides the model's batches, of which none can be drawn here: give --data")

    sizes = {name: [last - first if n == -1 else n for n in each.shape] for name, each in rank.inputs.items()}
    while True:
        inputs = rank.inputs.items()
        yield tuple(drawn(sizes[name], getattr(torch, i.dtype), i.high, generator, i.low or 0) for name, i in inputs)
