"""Build the example inputs and the target of a model file, resized to `--input` where given."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn

from splitc import units
from splitc.errors import CaptureError
from splitc.runtime.data import drawn, limits
from splitc.runtime.nested import parts, replaced, tensors

_FORM = (
    "write sizes as in 4x3x224x224, batch size first; a single number sets only the batch size; separate inputs by "
    "commas"
)
_FEW = 1024  # rows, which need no question
_COPIES = 8  # of an example, which its analysis makes at most
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def parse_sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """`4x3x32x32,4x7` -> ((4, 3, 32, 32), (4, 7))."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,12}(x[0-9]{1,12})*", part) for part in parts):
        raise CaptureError(f"--input {text}: {_FORM}")
    sizes = tuple(tuple(map(int, part.split("x"))) for part in parts)
    if any(0 in shape for shape in sizes):
        raise CaptureError(f"--input {text}: every size must be at least 1")
    if len({shape[0] for shape in sizes}) > 1:
        raise CaptureError(f"--input {text}: inputs have different batch sizes (their first size); they must match")
    return sizes


def evaluated(offered: Any, where: str, batch: int | None = None) -> Any:
    """Call a function, with `batch` when it has an argument of that name; return any other value unchanged.

    Raises CaptureError when the function fails.
    """
    if isinstance(offered, nn.Module | Tensor) or not callable(offered):
        return offered
    options = {"batch": batch} if batch is not None and takes_batch(offered) else {}
    if options and batch is not None and batch > _FEW:
        few = evaluated(offered, where, _FEW)
        require_room(sum(part.nbytes for _, part in tensors(as_tuple(few))) * batch // _FEW, batch)
    try:
        return offered(**options)
    except Exception as error:
        line = extract_tb(error.__traceback__)[-1]
        call = f"{where}({', '.join(f'{k}={v}' for k, v in options.items())})"
        at = "" if line.filename == __file__ else f" (line {line.lineno})"
        hint = "; it must work without arguments" if isinstance(error, TypeError) and not at and not options else ""
        raise CaptureError(f"{call} fails{at}: {type(error).__name__}: {error}{hint}") from error


def takes_batch(offered: Callable[..., Any]) -> bool:
    """Whether a function has an argument named `batch`."""
    try:
        return "batch" in inspect.signature(offered).parameters
    except (TypeError, ValueError):
        return False


def resized(sizes: tuple[tuple[int, ...], ...], example: Any, model: nn.Module) -> Any:
    """An example of the given sizes, with the tensors, dtypes and names of `example`.

    A size that is a single number asks for that many rows of the example.
    """
    if example is None:
        dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
        require_room(sum(map(prod, sizes)) * dtype.itemsize, sizes[0][0])
        return tuple(drawn(shape, dtype) for shape in sizes)
    given = dict(tensors(example if isinstance(example, Mapping) else as_tuple(example)))
    if len(sizes) == 1 and len(sizes[0]) == 1:
        sizes = sizes * len(given)
    if len(sizes) != len(given):
        named = f" ({', '.join(map('.'.join, given))})" if isinstance(example, Mapping) else ""
        raise CaptureError(
            f"--input gives {units.numbered(len(sizes), 'size')}, but the example has "
            f"{units.numbered(len(given), 'tensor')}{named}; {_FORM}"
        )
    asked = [
        (like, shape if len(shape) > 1 else (*shape, *like.shape[1:]))
        for like, shape in zip(given.values(), sizes, strict=True)
    ]
    require_room(sum(prod(shape) * like.itemsize for like, shape in asked), sizes[0][0])
    for (path, like), shape in zip(list(given.items()), sizes, strict=True):
        if len(shape) == 1:
            given[path] = rows(like, shape[0])
        else:
            low, high = limits(like)
            given[path] = drawn(shape, like.dtype, high, low=low)
    return replaced(example if isinstance(example, Mapping) else as_tuple(example), given)


def require_room(nbytes: int, batch: int) -> None:
    """Raise CaptureError when this machine has no memory for an example of so many bytes and its analysis."""
    if _COPIES * nbytes > (free := free_memory()):
        raise CaptureError(
            f"--input: an example of {units.numbered(batch, 'row')} takes {units.nbytes(nbytes)}, its analysis "
            f"{_COPIES} times as much, and this machine has {units.nbytes(free)}; give the batch of one rank, or fewer"
        )


def free_memory() -> float:
    """Free bytes on this machine, within the limit of this process's control group."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = float(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        free = min(free, float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return max(free, 0.0)


def rows(value: Any, batch: int) -> Any:
    """The first `batch` rows of every tensor in `value`, repeated when there are fewer."""
    if isinstance(value, Tensor):
        return value.repeat(-(-batch // max(len(value), 1)), *[1] * (value.dim() - 1))[:batch] if value.dim() else value
    return replaced(value, {path: rows(tensor, batch) for path, tensor in tensors(value)})


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def check_example(example: Any, where: str) -> None:
    """Raise CaptureError unless it is a tensor, or a tuple, list or dict of arguments with a tensor in one of them."""
    form = "give a tensor, a tuple of tensors, or a dict of them by the names of forward's arguments"
    if isinstance(example, Mapping):
        given = {str(name): part for name, part in example.items()}
    else:
        given = {f"[{k}]" if isinstance(example, tuple | list) else "": p for k, p in enumerate(as_tuple(example))}
    for name, part in given.items():
        if (parts(part) is None and not isinstance(part, (Tensor, *_PLAIN))) or (not name and isinstance(part, _PLAIN)):
            what = f" {name}" if name else ""
            numpy = "; torch.from_numpy makes a tensor of it" if type(part).__module__ == "numpy" else ""
            raise CaptureError(f"{where}: example{what} is a {type(part).__name__}; {form}{numpy}")
    if not any(tensors(list(given.values()))):
        raise CaptureError(f"{where}: example has no tensor; {form}")


def check_target(target: Any, where: str) -> None:
    """Raise CaptureError unless it is a tensor or several, or a dict or an object that holds some."""
    for part in as_tuple(target):
        if not any(tensors(part)):
            inside = "" if part is target else f" with a {type(part).__name__}"
            raise CaptureError(
                f"{where}: target is a {type(target).__name__}{inside}; "
                f"give a tensor with a row for each example, or a tuple of them"
            )
