"""Each reader's part of a dataset, so that the readers' batches together are the global batch of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .errors import LaunchError

Fits = Callable[[Sequence[int]], bool]
"""Whether readers' batches with these bounds give every rank with work an example."""


def tail_bounds(bounds: Sequence[int], examples: int) -> tuple[int, ...]:
    """The readers' bounds in a smaller last batch of `examples`: in proportion, all of them."""
    return tuple(b * examples // bounds[-1] for b in bounds)


def plan_epoch(
    number: int, bounds: Sequence[int], drop_last: bool, fits: Fits
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(where it begins, the readers' bounds) of every global batch of an epoch, the same on every rank.

    A tail that cannot give every rank an example is left out.
    """
    for start in range(0, number, bounds[-1]):
        left = number - start
        now = tuple(bounds) if left >= bounds[-1] else tail_bounds(bounds, left)
        if left >= bounds[-1] or (not drop_last and fits(now)):
            yield start, now


def order(number: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch takes a dataset's examples, the same on every rank and for every world."""
    if not shuffle:
        return torch.arange(number)
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))


def shard(
    dataset: Dataset[Any],
    bounds: Sequence[int],
    reader: int | None,
    names: Sequence[str],
    fits: Fits,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    drop_last: bool,
    **loader: Any,
) -> Iterator[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """(this reader's batch, all readers' sizes) of every step of an epoch; () on ranks that read no data.

    names: the program's inputs, for batches that are dicts.  loader: options of torch's DataLoader.
    """
    if not hasattr(dataset, "__len__"):
        raise LaunchError(
            f"{type(dataset).__name__} has no length, so it cannot be shared out; give worker.step batches of your "
            f"own, on each reader the part of its data_rank"
        )
    steps = list(plan_epoch(len(dataset), bounds, drop_last, fits))
    batches: Iterator[Any] = iter([()] * len(steps))
    if reader is not None:
        indices = order(len(dataset), shuffle, seed, epoch)
        own = [indices[start + now[reader] : start + now[reader + 1]].tolist() for start, now in steps]
        batches = (as_tuple(batch, names) for batch in DataLoader(dataset, batch_sampler=own, **loader))
    for batch, (_, now) in zip(batches, steps, strict=True):
        yield batch, tuple(b - a for a, b in pairwise(now))


def as_tuple(batch: Any, names: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """A collated batch as a flat tuple: inputs, then targets; dicts in the order of the program's inputs `names`.

    Raises LaunchError when a dict has other names, or something in the batch is no tensor.
    """
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        if unknown := [str(key) for key in batch if key not in names]:
            raise LaunchError(f"the batch has {', '.join(unknown)}; the program's inputs are {', '.join(names)}")
        batch = [batch[name] for name in names if name in batch]
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise LaunchError(f"the batch holds {type(batch).__name__}; a batch is tensors, inputs first and targets last")
    return tuple(part for item in batch for part in as_tuple(item, names))
