"""Divide a dataset among the readers, so that their batches together are the global batches of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .errors import LaunchError
from .nested import Path, at, parts, tensors
from .spec import RankSpec

HasWork = Callable[[Sequence[int]], bool]
"""Whether a step with these batch offsets gives an example to every rank with work."""


def tail_offsets(offsets: Sequence[int], examples: int) -> tuple[int, ...]:
    """The batch offsets of a smaller last batch of `examples`, divided in proportion."""
    return tuple(offset * examples // offsets[-1] for offset in offsets)


def plan_epoch(
    number: int, offsets: Sequence[int], drop_last: bool, has_work: HasWork
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(first example, batch offsets) of every global batch of an epoch of `number` examples, the same on every rank.

    A tail that cannot give every rank an example is dropped.
    """
    for start in range(0, number, offsets[-1]):
        left = number - start
        step_offsets = tuple(offsets) if left >= offsets[-1] else tail_offsets(offsets, left)
        if left >= offsets[-1] or (not drop_last and has_work(step_offsets)):
            yield start, step_offsets


def order(number: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order of a dataset's examples in an epoch, the same on every rank and for every world."""
    if not shuffle:
        return torch.arange(number)
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))


def shard(
    dataset: Dataset[Any],
    offsets: Sequence[int],
    reader: int | None,
    paths: Mapping[str, Path],
    has_work: HasWork,
    *,
    shuffle: bool,
    seed: int,
    epoch: int,
    drop_last: bool,
    **loader: Any,
) -> Iterator[tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """(this reader's batch, all readers' batch sizes) of every step of an epoch; () on ranks that read no data.

    paths: of the program's inputs, for batches that are nested.  loader: options of torch's DataLoader.
    Raises LaunchError when an epoch would have no step.
    """
    if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
        raise LaunchError(
            f"{type(dataset).__name__} has no length or no order, so it cannot be divided among the readers; give "
            f"worker.step batches of your own, on each reader the examples of its data_rank"
        )
    steps = list(plan_epoch(len(dataset), offsets, drop_last, has_work))
    if not steps:
        raise LaunchError(
            f"the dataset has {len(dataset)} examples and a global batch {offsets[-1]}, so an epoch has no step; "
            f"give more examples, or a smaller batch_size{' or drop_last=False' if drop_last else ''}"
        )
    batches: Iterator[Any] = iter([()] * len(steps))
    if reader is not None:
        indices = order(len(dataset), shuffle, seed, epoch)
        own = [indices[start + bounds[reader] : start + bounds[reader + 1]].tolist() for start, bounds in steps]
        batches = (as_tuple(batch, paths) for batch in DataLoader(dataset, batch_sampler=own, **loader))
    for batch, (_, bounds) in zip(batches, steps, strict=True):
        yield batch, tuple(last - first for first, last in pairwise(bounds))


def as_tuple(batch: Any, paths: Mapping[str, Path] | None = None) -> tuple[Tensor, ...]:
    """A collated batch as a flat tuple: inputs, then targets; dicts in the order of the program's inputs.

    paths: of the inputs by name; where one is nested, the batch is as the model takes it, or all tensors in order.
    Raises LaunchError when a dict has other names, or something in the batch is no tensor.
    """
    paths = paths or {}
    if any(len(path) > 1 for path in paths.values()):
        return _taken(list(batch) if type(batch) in (list, tuple) else [batch], paths)
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        if unknown := [str(key) for key in batch if key not in paths]:
            raise LaunchError(f"the batch has {', '.join(unknown)}; the program's inputs are {', '.join(paths)}")
        batch = [batch[name] for name in paths if name in batch]
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise LaunchError(f"the batch holds {type(batch).__name__}; a batch is tensors, inputs first and targets last")
    return tuple(tensor for item in batch for tensor in as_tuple(item, paths))


def _taken(items: Sequence[Any], paths: Mapping[str, Path]) -> tuple[Tensor, ...]:
    """The tensors at these paths.  items: the arguments in order, dicts of them by name, or the tensors themselves."""
    items = [item for item in items if any(tensors(item))]
    if len(items) == len(paths) and all(isinstance(item, Tensor) for item in items):
        return tuple(items)
    arguments = dict.fromkeys(path[0] for path in paths.values())
    named = {key: part for item in items if isinstance(item, Mapping) for key, part in (parts(item) or {}).items()}
    others = (item for item in items if not isinstance(item, Mapping))
    by_name = {**named, **dict(zip((name for name in arguments if name not in named), others, strict=False))}
    for given in (dict(zip(arguments, items, strict=False)), by_name):
        found = tuple(at(given, path) for path in paths.values())
        if all(isinstance(tensor, Tensor) for tensor in found):
            return found
    missing = next(".".join(path) for path, tensor in zip(paths.values(), found, strict=True) if tensor is None)
    raise LaunchError(f"the batch has no tensor {missing}; give it as the example was given, or as {', '.join(paths)}")


def checked(batch: tuple[Any, ...], spec: RankSpec, offsets: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of a batch, inputs first.  offsets: where each reader's examples begin.

    Raises LaunchError when a step cannot take it.
    """
    if any(torch.is_autocast_enabled(kind) for kind in {device.type, "cpu"}):
        raise LaunchError(
            "worker.step and worker.evaluate are called inside torch.autocast, where ranks would exchange other "
            "dtypes than they were compiled for; call them outside, and compile with autocast=torch.bfloat16"
        )
    if any(each.path for each in spec.inputs.values()):
        batch = as_tuple(batch, spec.paths)
    if len(batch) != len(spec.inputs):
        raise LaunchError(
            f"rank {spec.index} ({spec.role}) takes {len(spec.inputs)} tensors "
            f"({', '.join(spec.inputs) or 'it reads no data'}), got {len(batch)}"
        )
    reader = spec.data_rank or 0
    first, last = offsets[reader : reader + 2] if spec.inputs else (0, 0)
    for tensor, (name, expected) in zip(batch, spec.inputs.items(), strict=True):
        shape = tuple(last - first if n == -1 else n for n in expected.shape)
        is_tensor = isinstance(tensor, Tensor)
        if not is_tensor or tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{expected.dtype}":
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if is_tensor else f"a {type(tensor).__name__}"
            raise LaunchError(
                f"rank {spec.index}: {name} is {got}, this step needs {shape} torch.{expected.dtype}; batches of "
                f"other sizes come from worker.shard, or after worker.use_sizes"
            )
    return batch
