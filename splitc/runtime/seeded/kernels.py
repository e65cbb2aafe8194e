"""Dropout as one operation of torch, `splitc::dropout`: one node to a compiler, one kernel on a GPU, the same bits.

What differs from step to step arrives in tensors, so that a compiled stage is the same program in every step.  The mask
is kept for backward, a byte for each draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from .words import Grid, Layout, words_of

_BLOCK = 1 << 16  # numbers for each thread of a CPU: 256 kB, which stay in its cache


@dataclass(frozen=True)
class KernelCost:
    """What a call of an operation costs on a GPU: kernels launched, and bytes that they read and write."""

    launches: int
    nbytes: int


KERNELS: dict[str, Callable[..., KernelCost]] = {
    "splitc::dropout": lambda value, made: KernelCost(1, value.nbytes + sum(each.nbytes for each in made)),
    "splitc::dropout_backward": lambda grad, mask, made: KernelCost(1, grad.nbytes + mask.nbytes + made.nbytes),
}
"""Operation -> its cost, as a function of its arguments, by their names, and of what it has `made`."""


def dropout(
    value: Tensor,
    p: float,
    numbers: Tensor,
    examples: Tensor | None,
    label: Sequence[int],
    layout: Layout,
    feature_dims: int = 0,
) -> Tensor:
    """`value` with elements set to 0 with probability `p` (exact to 2^-32), and the others divided by 1 - p.

    numbers: (3,) int64 on the CPU: the seed, the step, what is added to each of `examples`.
    examples: (count,) int32 on the device of `value`: the indices of its examples; None: all draw as example 0.
    feature_dims: 0 for a draw for each element; n for one for each index of the first n dims (dropout2d: 2).
    Raises ValueError when the value has another number of examples.
    """
    dims = feature_dims if 0 < feature_dims < value.dim() else value.dim()
    place = [dims, -1 if layout.dim is None else layout.dim, layout.rows, layout.outer]
    found: Tensor = _dropout(value, numbers, examples, p, label, place, layout.columns or ())[0]
    return found


@torch.library.custom_op(
    "splitc::dropout",
    mutates_args=(),
    schema="(Tensor value, Tensor numbers, Tensor? examples, float p, int[] label, int[] place, int[] columns)"
    " -> (Tensor, Tensor)",
)
def _dropout(
    value: Tensor,
    numbers: Tensor,
    examples: Tensor | None,
    p: float,
    label: Sequence[int],
    place: Sequence[int],
    columns: Sequence[int],
) -> tuple[Tensor, Tensor]:
    out, mask = _empty(value, numbers, examples, p, label, place)
    dims, dim, rows, apart = place
    by_example = 0 <= dim < dims
    shard = (columns[0], columns[1]) if columns and dims == value.dim() else None
    grid = Grid.of(value.shape[:dims], Layout(dim if by_example else None, rows, apart, shard))
    seed, step, before = numbers.tolist()
    if examples is None or not by_example:
        examples, before = torch.zeros(grid.count, dtype=torch.int32, device=value.device), 0
    words = words_of(seed, step, tuple(label), before=before)
    threshold = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
    if value.numel() and (fused := _fused(value)) is not None:
        fused.dropout(value, out, mask, examples, words, threshold, scale_of(p, value.dtype), grid)
        return out, mask
    keys = grid.keys(examples, words)
    drawn = mask if mask.is_contiguous() else torch.empty_like(mask, memory_format=torch.contiguous_format)
    lying = drawn.view(torch.uint8).view(grid.shape)  # torch converts uint8 much faster than bool
    size = _BLOCK * torch.get_num_threads() if value.device.type == "cpu" else value.numel()
    for where, found in grid.blocks(keys, size) if mask.numel() else ():
        lying[where].copy_(found.lt_(threshold))
    if drawn is not mask:
        mask.copy_(drawn)
    return _times(value, mask, p), mask


def _fused(value: Tensor) -> Any:
    """The module whose kernel takes the value; None without one."""
    return _of_triton() if value.is_cuda and value.is_floating_point() and value.numel() < 2**31 - 2**10 else None


@cache
def _of_triton() -> Any:
    return resolve_name(f"{__package__}.fused") if find_spec("triton") else None


@_dropout.register_fake
def _empty(value: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dims = given[4][0]
    if dims == value.dim():
        return torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)
    shape = [*value.shape[:dims], *[1] * (value.dim() - dims)]
    return torch.empty_like(value), value.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("splitc::dropout_backward", mutates_args=())
def _scaled(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    if grad.is_cuda and not grad.is_complex():
        scaled: Tensor = torch.ops.aten.native_dropout_backward(grad, mask, scale_of(p, grad.dtype))
        return scaled
    return _times(grad, mask, p)


@_scaled.register_fake
def _(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    mask, ctx.p = (output[1], inputs[3]) if isinstance(output, tuple) else inputs[1:]
    ctx.save_for_backward(mask)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    found = None if grad is None else _scaled(grad, *ctx.saved_tensors, ctx.p)
    return found, *[None] * (len(ctx.needs_input_grad) - 1)


_dropout.register_autograd(_backward, setup_context=_keep)
_scaled.register_autograd(_backward, setup_context=_keep)


def _times(value: Tensor, mask: Tensor, p: float) -> Tensor:
    """`value` times 1 / (1 - p) where `mask`, else 0."""
    factors = mask.view(torch.uint8).to(value.dtype).div_(1 - p if p < 1 else 1)
    if (factors.shape, factors.stride()) == (value.shape, value.stride()):
        return factors.mul_(value)
    return torch.mul(value, factors, out=torch.empty_like(value))


@cache
def scale_of(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p), rounded as `_times` rounds it."""
    return float(torch.ones((), dtype=dtype, device="cpu").div_(1 - p if p < 1 else 1))
