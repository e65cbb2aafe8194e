"""Each reader's part of a dataset, so that the readers' batches together are the global batch of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


def tail_sizes(bounds: Sequence[int], examples: int) -> tuple[int, ...]:
    """How many of `examples` each reader takes when a batch is smaller than compiled: in proportion, all of them."""
    cuts = [b * examples // bounds[-1] for b in bounds]
    return tuple(b - a for a, b in zip(cuts, cuts[1:], strict=False))


def plan_epoch(number: int, bounds: Sequence[int], shuffle: bool, seed: int, epoch: int, drop_last: bool,
               ) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """(indices of a global batch, how many of them each reader takes), the same on every rank.

    A tail too small to give every reader an example is left out.
    """
    generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
    order: list[int] = torch.randperm(number, generator=generator).tolist() if shuffle else list(range(number))
    whole = bounds[-1]
    for start in range(0, number, whole):
        indices = order[start:start + whole]
        sizes = tail_sizes(bounds, len(indices))
        if len(indices) == whole or (not drop_last and min(sizes) > 0):
            yield indices, sizes


def shard(dataset: Dataset[Any], bounds: Sequence[int], reader: int | None, *, shuffle: bool, seed: int, epoch: int,
          drop_last: bool, num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] | None = None,
          ) -> Iterator[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """(this reader's batch, all readers' sizes) for every step of an epoch; () on ranks that read no data."""
    steps = list(plan_epoch(len(dataset), bounds, shuffle, seed, epoch, drop_last))  # type: ignore[arg-type]
    if reader is None:
        yield from (((), sizes) for _, sizes in steps)
        return
    own = [indices[sum(sizes[:reader]):sum(sizes[:reader + 1])] for indices, sizes in steps]
    loader = DataLoader(dataset, batch_sampler=own, num_workers=num_workers, collate_fn=collate_fn)
    for batch, (_, sizes) in zip(loader, steps, strict=True):
        yield as_tuple(batch), sizes


def as_tuple(batch: Any) -> tuple[Tensor, ...]:
    """A collated batch as a flat tuple: inputs, then targets."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, dict):
        batch = list(batch.values())
    return tuple(part for item in batch for part in as_tuple(item))
