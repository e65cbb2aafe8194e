"""Bytes that one op reads and writes in memory.

Every storage counts once: a product of a tensor with itself reads it once, an expanded tensor as few numbers as it has.
A view moves nothing, nor does memory that is only set aside.  Some ops read less than what they are given (rows of a
table, the target's class) or nothing of it (`zeros_like`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from splitc.ir.torch_ops import ops_with


def bytes_accessed(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any, out: Any) -> float | None:
    """Bytes that `func` reads and writes to compute `out`; None where `out` is only a view."""
    name = name_of(func)
    if name == "_embedding_bag_backward" and out.is_sparse:  # a row a look-up, copied into .grad
        errors, indices = args[:2]
        return _each_once((errors, indices)) + float(3 * indices.numel() * errors.shape[-1] * errors.itemsize)
    given, made = _tensors((args, kwargs)), _tensors(out)
    storages = {_storage(each) for each in given}
    fresh = {_storage(each): each for each in made if _storage(each) not in storages}
    changes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
    if (not fresh and not changes) or name.removeprefix("_") in _FREE:
        return None
    written = sum(map(_nbytes, _written(func, args, kwargs))) + sum(map(_nbytes, fresh.values()))
    return _read(name, args, given, made) + written


def name_of(func: torch._ops.OpOverload) -> str:
    """`add` of `aten::add_.Tensor`; `mylib::add` of an op that is not torch's own."""
    space, _, name = str(func._schema.name).partition("::")
    return (name.removesuffix("_") or name) if space == "aten" else f"{space}::{name}"


def _read(name: str, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    if name in _UNREAD:
        return 0.0
    if name in _LOOKUPS:
        table, rest = given[0], given[1:]
        return min(_nbytes(table), float(_LOOKUPS[name](given, made) * table.itemsize)) + _each_once(rest)
    if name == "embedding_dense_backward":  # the rows of a table of zeros are read and written again
        return 3 * _nbytes(given[0]) + _each_once(given[1:])
    unread = 1 if "_pool" in name and name.endswith("_backward") else _SHAPE_ONLY.get(name)
    if unread is not None:
        return _each_once(each for each in given if each is not args[unread])
    return _each_once(given)


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The arguments that an op writes into."""
    found = []
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[k] if k < len(args) else kwargs.get(argument.name))
    return found


def _each_once(tensors: Iterable[Tensor]) -> float:
    """Bytes of tensors; views of one storage have together no more than it."""
    read: dict[int, float] = {}
    for each in tensors:
        storage = _storage(each)
        most = float(each.untyped_storage().nbytes()) if each.layout == torch.strided else math.inf
        read[storage] = min(read.get(storage, 0.0) + _nbytes(each), most)
    return sum(read.values())


def _nbytes(tensor: Tensor) -> float:
    """Bytes of the numbers that a tensor has; an expanded dim repeats them."""
    if tensor.layout != torch.strided:
        return float(tensor.numel() * tensor.itemsize)
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(math.prod(sizes) * tensor.itemsize)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _tensors(tree: Any) -> list[Tensor]:
    found = (each for each in tree_leaves(tree) if isinstance(each, Tensor))
    return [each for each in found if not each.is_sparse]  # which ops made of the others


_FREE, _UNREAD = ops_with("no_bytes"), ops_with("unread")
_LOOKUPS: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], int]] = {  # numbers that are read of a table
    **dict.fromkeys(
        ("embedding", "index_select", "gather", "index", "_unsafe_index", "take"), lambda given, made: made[0].numel()
    ),
    **dict.fromkeys(
        ("_embedding_bag", "_embedding_bag_forward_only"), lambda given, made: given[1].numel() * given[0].shape[-1]
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), lambda given, made: given[1].numel()),
}
_SHAPE_ONLY = {"nll_loss_backward": 1, "nll_loss2d_backward": 1, "copy": 0}
"""Which argument of an op is not read."""
