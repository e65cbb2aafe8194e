"""torch's kernels of synchronised BatchNorm, which it has on GPUs only, written in torch for the CPU.

They do what Normalization.cuh does, in its order: counts of a member are merged one after the other, in float32 where
the input is in half precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from splitc.runtime.collectives import sync_batch_norm

Pair = tuple[Tensor, Tensor]


@contextmanager
def kernels_on_the_cpu() -> Iterator[None]:
    """While this holds, BatchNorm is synchronised on the CPU as it is on a GPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
            library.impl(f"batch_norm_{kernel.__name__}", kernel, "CPU")
        with patch.object(sync_batch_norm, "has_kernels", lambda x: True):
            yield


def stats(x: Tensor, eps: float) -> Pair:
    """Mean and 1 / sqrt(var + eps) of each channel."""
    assert x.numel() and _is_dense(x)
    var, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (var + eps).rsqrt()


def gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> Pair:
    """Those of all members together; updates the running ones.  means, inverses: (members, C).  counts: (members,)."""
    of_type = x if running_mean is None else running_mean
    assert counts.dtype == of_type.dtype and means.dtype == inverses.dtype == _wide(of_type).dtype
    total, mean, squares = 0.0, torch.zeros_like(means[0]), torch.zeros_like(means[0])
    for m, inverse, count in zip(means, inverses, counts.tolist(), strict=True):
        own = ((1 / inverse) ** 2 - eps) * count
        factor = 1 / (total + count) if total + count else math.inf
        squares = squares + own + (mean - m) ** 2 * total * count * factor
        mean = total * factor * mean + count * factor * m
        total = float(int(total + count))  # an int32 in the kernel
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * squares / (total - 1))
    return mean, (squares / total + eps).rsqrt()


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
    """x normalised by mean and inverse, in the dtype and order of `x`."""
    y = (_wide(x) - _nd(mean, x)) * _nd(inverse, x)
    if weight is not None:
        y = y * _nd(weight, x)
    if bias is not None:
        y = y + _nd(bias, x)
    return torch.empty_like(x).copy_(y)


def backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    for_x: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor | None, ...]:
    """sum dy, sum dy (x - mean), and the gradients of weight and bias in the dtype of the weight."""
    assert grad.dtype == x.dtype and grad.shape == x.shape and _is_dense(x) and _is_dense(grad)
    assert weight is not None or not (for_weight or for_bias), "whose options the kernel takes"
    dims, dy = _others(x), _wide(grad)
    sum_dy, sum_dy_xmu = dy.sum(dims), (dy * (_wide(x) - _nd(mean, x))).sum(dims)
    d_weight = (sum_dy_xmu * inverse).to(weight.dtype) if weight is not None and for_weight else None
    d_bias = sum_dy.to(weight.dtype) if weight is not None and for_bias else None
    return sum_dy if for_x else None, sum_dy_xmu if for_x else None, d_weight, d_bias


def backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of x."""
    assert counts.dtype == torch.int32 and counts.is_contiguous() and grad.dtype == x.dtype
    assert weight is None or weight.dtype == mean.dtype
    n = int(counts.sum())
    centred = _wide(x) - _nd(mean, x)
    scale = inverse if weight is None else inverse * weight
    d_x = (_wide(grad) - _nd(sum_dy / n, x) - centred * _nd(inverse**2 * sum_dy_xmu / n, x)) * _nd(scale, x)
    return torch.empty_like(x).copy_(d_x)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _others(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _nd(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def _is_dense(x: Tensor) -> bool:
    formats = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    return any(x.is_contiguous(memory_format=each) for each in formats)
