"""Take nested batches apart, and make them again of other tensors: dicts, lists, tuples, dataclasses, objects."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .bags import divided, whole
from .errors import LaunchError

Path = tuple[str, ...]
"""Keys, positions and names of fields, from the outside in."""


def parts(value: Any) -> dict[str, Any] | None:
    """What a container holds, by key, position or field; None for a value that is none."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return dict(zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True))
    if isinstance(value, (Tensor, type, nn.Module)):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    own = getattr(value, "__dict__", {})
    return dict(own) if any(isinstance(part, Tensor) for part in own.values()) else None


def tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a nested value, with its path."""
    if isinstance(value, Tensor):
        yield path, value
    for key, part in (parts(value) or {}).items():
        yield from tensors(part, (*path, key))


def at(value: Any, path: Path) -> Any:
    """What a nested value holds at a path, of lists packed too; None where it holds nothing."""
    for key in path:
        is_list = key in LISTS and isinstance(value, (list, tuple)) and len(value)
        if isinstance(value, Tensor):
            value = divided(value, key)
        else:
            value = packed(value, key) if is_list else (parts(value) or {}).get(key)
    return value


LISTS = ROWS, VALUES, SIZES, DICTS = "list_rows", "list_values", "list_sizes", "list_dicts"
"""What stands for a list with an element for each example: rows of one size; all values, and their sizes; dicts."""


def packed(value: Sequence[Any], key: str) -> Any:
    """A part of what stands for a list.  Raises LaunchError where its tensors have not one size."""
    if key == DICTS:
        return {name: [each.get(name) for each in value] for name in value[0]}
    sizes = [tuple(each.shape) if isinstance(each, Tensor) else None for each in value]
    if None in sizes or (key == ROWS and len(set(sizes)) > 1):
        raise LaunchError(
            f"a list has tensors of the sizes {sizes}, of one in the example: compile with one in which they differ"
        )
    if key == SIZES:
        return torch.tensor(sizes, device=value[0].device)
    return torch.stack(list(value)) if key == ROWS else torch.cat([each.flatten() for each in value])


def unpacked(value: Any) -> Any:
    """A nested value with its lists, and bags that offsets divide, again, where its tensors have values."""
    held = parts(value) or {}
    made = {key: unpacked(part) for key, part in held.items()}
    key, first = next(iter(made.items()), ("", None))  # type: str, Any
    if (bags := whole(first, key)) is not None:
        return bags
    if made.keys() == {ROWS} and type(first) is Tensor:
        return list(first.unbind())
    if made.keys() == {VALUES, SIZES} and type(first) is Tensor:
        sizes = made[SIZES].tolist()
        return [flat.view(size) for flat, size in zip(first.split(list(map(math.prod, sizes))), sizes, strict=True)]
    if made.keys() == {DICTS} and all(isinstance(part, list) for part in first.values()):
        return [dict(zip(first, each, strict=True)) for each in zip(*first.values(), strict=True)]
    if all(made[key] is part for key, part in held.items()):
        return value
    return {key: made[str(key)] for key in value} if isinstance(value, dict) else with_parts(value, made)


def replaced(value: Any, new: Mapping[Path, Any], path: Path = ()) -> Any:
    """A copy of a nested value with other tensors, by path; the rest is shared."""
    if isinstance(value, Tensor):
        return new.get(path, value)
    held = parts(value) or {}
    made = {key: replaced(part, new, (*path, key)) for key, part in held.items()}
    return value if all(made[key] is part for key, part in held.items()) else with_parts(value, made)


def with_parts(value: Any, made: Mapping[str, Any]) -> Any:
    """A copy of a container with other parts."""
    if isinstance(value, tuple):
        names = getattr(type(value), "__match_args__", ())  # of torch.return_types
        if hasattr(value, "_fields") or not names:
            return type(value)(*made.values()) if hasattr(value, "_fields") else tuple(made.values())
        return namedtuple(type(value).__name__, names)(*made.values())
    if isinstance(value, list):
        return list(made.values())
    copied = copy.copy(value)
    for key in value if isinstance(value, Mapping) else made:
        if isinstance(value, Mapping):
            copied[key] = made[str(key)]
        else:
            object.__setattr__(copied, key, made[key])
    return copied


class Output(dict[str, Any]):
    """What a model returned as a dict or an object: its parts by key, and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the model returned {', '.join(map(str, self))}, no {name}")


def named(value: Any) -> Any:
    """A nested value in which each dict is an `Output`."""
    if isinstance(value, dict):
        return Output({key: named(part) for key, part in value.items()})
    return type(value)(map(named, value)) if isinstance(value, (list, tuple)) else value
