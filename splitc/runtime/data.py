"""Divide a dataset among the readers, so that their batches together are the global batches of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .bags import are_divided, divided
from .errors import LaunchError
from .nested import Path, at, parts, tensors
from .spec import RankSpec

HasWork = Callable[[Sequence[int]], bool]
"""Whether a step with these batch offsets gives an example to every rank with work."""


def tail_offsets(offsets: Sequence[int], examples: int, first: bool = False) -> tuple[int, ...]:
    """The batch offsets of a smaller last batch of `examples`, divided in proportion.

    first: the first readers have what does not go round, as those whose buffers count where others have no example.
    """
    return tuple((offset * examples + first * (offsets[-1] - 1)) // offsets[-1] for offset in offsets)


def plan_epoch(
    number: int, offsets: Sequence[int], drop_last: bool, has_work: HasWork, start: int = 0
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(first example, batch offsets) of the global batches of an epoch of `number` examples, from `start` on.

    The same on every rank; `last_offsets` says what becomes of a tail.
    """
    whole, left = divmod(max(number - start, 0), offsets[-1])
    ends = last_offsets(whole > 0, left, offsets, drop_last, has_work, start > 0)
    for bounds in [tuple(offsets)] * (whole - 1) + ends:
        yield start, bounds
        start += bounds[-1]


def last_offsets(
    has_whole: bool, left: int, offsets: Sequence[int], drop_last: bool, has_work: HasWork, begun: bool = False
) -> list[tuple[int, ...]]:
    """The batch offsets of the last whole global batch, if there is one, and of `left` examples after it.

    Where these alone would leave a rank without examples, both are divided anew into two batches, or are one.
    begun: steps of the epoch were made; if too few examples are left after a change of readers, some ranks have none.
    """
    last, size = [offsets[-1]] * has_whole, offsets[-1] + left
    ways = [[*last, left], [size - size // 2, size // 2], [size]] if has_whole else [[left]]
    for sizes in ways if left and not drop_last else []:
        bounds = [tail_offsets(offsets, each) for each in sizes]
        if all(map(has_work, bounds)):
            return bounds
    if begun and left and not drop_last:
        return [tail_offsets(offsets, left, first=True)]
    return [tuple(offsets)] * has_whole


def order(number: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order of a dataset's examples in an epoch, the same on every rank and for every world."""
    if not shuffle:
        return torch.arange(number)
    return torch.randperm(number, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch))


def as_tuple(batch: Any, paths: Mapping[str, Path] | None = None) -> tuple[Tensor, ...]:
    """A collated batch as a flat tuple: inputs, then targets; what dicts name goes by name, the rest by order.

    paths: of the inputs by name; where one is nested, the batch is as the model takes it, or all tensors in order.
    Raises LaunchError when a dict has other names, or something in the batch is no tensor.
    """
    paths = paths or {}
    items = list(batch) if type(batch) in (list, tuple) else [batch]
    if any(len(path) > 1 for path in paths.values()):
        return _taken(items, paths)
    if any(isinstance(item, Mapping) for item in items):
        named = {str(key): each for item in items if isinstance(item, Mapping) for key, each in item.items()}
        _require_known(named, list(paths))
        others = as_tuple([item for item in items if not isinstance(item, Mapping)])
        free = [name for name in paths if name not in named]
        named.update(zip(free, others, strict=False))
        items = [*(named[name] for name in paths if name in named), *others[len(free) :]]
    elif isinstance(batch, Tensor):
        return (batch,)
    elif not isinstance(batch, Sequence) or isinstance(batch, str):
        raise LaunchError(f"the batch holds {type(batch).__name__}; a batch is tensors, inputs first and targets last")
    else:
        items = list(batch)
    return tuple(tensor for item in items for tensor in as_tuple(item, paths))


def readable(tensor: Tensor) -> Tensor:
    """The tensor, in float32 where torch has no statistics of its dtype, as of floats of 8 bits."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 2 else tensor


def limits(seen: Tensor) -> tuple[int, int | float | None]:
    """The `low` and `high` with which `drawn` gives numbers like a tensor's; of floats if all are positive or small."""
    if seen.is_meta or not seen.numel() or seen.is_complex() or not seen.isfinite().all():
        return 0, None
    low, high = math.floor(seen.min().item()), math.ceil(seen.max().item())
    if not seen.is_floating_point():
        return max(low, 0) if high >= 0 else low, high + 1  # negative ones stand for padding
    return (low, float(high)) if -1 <= low < high and (low >= 0 or high <= 1) else (0, None)


def drawn(
    sizes: Sequence[int], dtype: torch.dtype, high: Any = None, generator: torch.Generator | None = None, low: int = 0
) -> Tensor:
    """Random numbers, of which synthetic data are, from `low` on.  high: see `Input`; None: 2, none of floats."""
    if high is None and (dtype.is_floating_point or dtype.is_complex):
        return torch.randn(sizes, dtype=dtype, generator=generator)
    if isinstance(high, float):
        return torch.rand(sizes, dtype=dtype, generator=generator).mul_(high - low).add_(low)
    if isinstance(high, list):
        return torch.randint(1 << 62, sizes, generator=generator).remainder_(torch.tensor(high)).to(dtype)
    return torch.randint(low, 2 if high is None else high, sizes, generator=generator).to(dtype)


def without_examples(batch: Sequence[Tensor], spec: RankSpec) -> tuple[Tensor, ...]:
    """Of a batch as `as_tuple` gives it no example, for a reader that has none in a step."""
    shapes = ([slice(0) if n < 0 else slice(None) for n in each.shape] for each in spec.inputs.values())
    return tuple(tensor[tuple(index)] for tensor, index in zip(batch, shapes, strict=False))


def _require_known(names: Iterable[str], inputs: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in inputs]:
        raise LaunchError(
            f"the batch has {', '.join(unknown)}; the program's inputs are {', '.join(inputs)}; leave the others out, "
            f"in collate_fn say, or compile with an example that has them"
        )


def _taken(items: Sequence[Any], paths: Mapping[str, Path]) -> tuple[Tensor, ...]:
    """The tensors at these paths.  items: the arguments in order, dicts of them by name, or the tensors themselves."""
    items = [item for item in items if any(tensors(item))]
    if len(items) == len(paths) and all(isinstance(item, Tensor) for item in items):
        ends = [path[-1] for path in paths.values()]
        if are_divided(zip(ends, items, strict=True)):
            return tuple(items)
        made = [divided(item, end) for item, end in zip(items, ends, strict=True)]
        return tuple(item if own is None else own for item, own in zip(items, made, strict=True))
    arguments = dict.fromkeys(path[0] for path in paths.values())
    named = {key: part for item in items if isinstance(item, Mapping) for key, part in (parts(item) or {}).items()}
    others = (item for item in items if not isinstance(item, Mapping))
    by_name = {**named, **dict(zip((name for name in arguments if name not in named), others, strict=False))}
    for given in (dict(zip(arguments, items, strict=False)), by_name):
        found = tuple(at(given, path) for path in paths.values())
        if all(isinstance(tensor, Tensor) for tensor in found):
            if given is by_name:
                _require_known(named, list(arguments))
            return found
    missing = next(".".join(path) for path, tensor in zip(paths.values(), found, strict=True) if tensor is None)
    raise LaunchError(f"the batch has no tensor {missing}; give it as the example was given, or as {', '.join(paths)}")


def without_targets(batch: tuple[Any, ...], spec: RankSpec) -> tuple[Any, ...]:
    """Of a batch as a step takes it, what the model's output is computed of."""
    if len(batch) == len(spec.inputs) and all(isinstance(each, Tensor) for each in batch):
        return tuple(each for each, name in zip(batch, spec.inputs, strict=True) if name in spec.predicts)
    arguments = dict.fromkeys(path[0] for path in spec.paths.values())
    others = set(arguments) - {spec.paths[name][0] for name in spec.predicts}
    if len(batch) > len(arguments) - len(others):  # what the output is not computed of is among them
        batch = tuple(each for each, name in zip(batch, arguments, strict=False) if name not in others)
    return tuple(
        {k: v for k, v in each.items() if k not in others} if isinstance(each, Mapping) else each for each in batch
    )


def checked(batch: tuple[Any, ...], spec: RankSpec, offsets: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of a batch, inputs first.  offsets: where each reader's examples begin.

    Raises LaunchError when a step cannot take it.
    """
    if any(torch.is_autocast_enabled(kind) for kind in {device.type, "cpu"}):
        raise LaunchError(
            "worker.step and worker.evaluate are called inside torch.autocast, where ranks would exchange other "
            "dtypes than they were compiled for; call them outside, and compile with autocast=torch.bfloat16"
        )
    if not spec.inputs:
        batch = tuple(tensor for _, tensor in tensors(batch))
    elif any(each.path for each in spec.inputs.values()) or any(isinstance(b, (Mapping, list, tuple)) for b in batch):
        batch = as_tuple(batch, spec.paths)
    if len(batch) != len(spec.inputs):
        raise LaunchError(
            f"rank {spec.index} ({spec.role}) takes {len(spec.inputs)} tensors "
            f"({', '.join(spec.inputs) or 'it reads no data'}), got {len(batch)}"
        )
    reader = spec.data_rank or 0
    first, last = offsets[reader : reader + 2] if spec.inputs else (0, 0)
    for tensor, (name, expected) in zip(batch, spec.inputs.items(), strict=True):
        is_tensor = isinstance(tensor, Tensor)
        own = tensor.shape if is_tensor and tensor.dim() == len(expected.shape) else expected.shape
        sizes = zip(expected.shape, own, strict=True)
        shape = tuple(last - first if n == -1 else m if n == -2 else n for n, m in sizes)
        if not is_tensor or tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{expected.dtype}":
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if is_tensor else f"a {type(tensor).__name__}"
            remedy = "batches of other sizes come from worker.loader, or after worker.use_sizes"
            if is_tensor and tuple(tensor.shape) == shape:
                remedy = "give it that dtype, or compile with an example of this one"
            needed = f"{shape} torch.{expected.dtype}; {remedy}"
            raise LaunchError(f"rank {spec.index}: {name} is {got}, this step needs {needed}")
    inner = [-1 in expected.shape[1:] for expected in spec.inputs.values()]  # contiguous as traced
    return tuple(tensor.contiguous() if each else tensor for tensor, each in zip(batch, inner, strict=True))
