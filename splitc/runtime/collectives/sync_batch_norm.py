"""BatchNorm over the examples of all members of a group, exact in value and gradient.

With the sums taken over all N values of a channel, on all members:

    mean = sum x / N        var = sum (x - mean)^2 / N        h = (x - mean) / sqrt(var + eps)
    y = weight h + bias
    dx = weight / sqrt(var + eps) (dy - sum dy / N - h sum(dy h) / N)

Forward needs one all-reduce of 2C + 1 numbers and backward one of 2C.  Each member's batch counts by its size.

On a GPU torch's own kernels for it do the same, in two launches of each direction over x.  There forward has an
all-gather of each member's mean, 1 / sqrt(var + eps) and number of values, which a third one merges.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm as _Norm

from ..memory_format import dense
from ..transport.base import describe
from .model_parallel import Group

_NO_EXAMPLES = 1e-30
"""How many values a member without any gives to the kernels: they divide by the sum of those before, and not by 0."""


def batch_norm(group: Group, x: Tensor, module: _Norm) -> Tensor:
    """The forward of a BatchNorm `module` on x (examples, C, ...), with the statistics of all members' examples.

    All members update the running statistics identically, with the unbiased variance.  The gradients of weight and
    bias are of this member's examples only, to be summed as those of any replicated parameter.
    In evaluation, and in a group of one rank, this is `F.batch_norm` itself.
    Raises ValueError, on every member, when a channel has no more than one value in all.
    """
    training = module.training or module.running_mean is None
    momentum = module.momentum or 0.0
    if training and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        momentum = 1.0 / float(module.num_batches_tracked) if module.momentum is None else momentum
    affine = module.weight, module.bias
    if not training or group.size == 1:
        return F.batch_norm(x, module.running_mean, module.running_var, *affine, training, momentum, module.eps)
    function = _ByKernels if has_kernels(x) else _BatchNorm
    y: Tensor = function.apply(x, *affine, group, module, momentum)  # type: ignore[no-untyped-call]
    return y


def has_kernels(x: Tensor) -> bool:
    """Whether torch has its kernels of synchronised BatchNorm where `x` is."""
    return x.is_cuda


class _BatchNorm(torch.autograd.Function):
    """Normalise by the statistics of all members."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, group: Group, module: _Norm, momentum: float
    ) -> Tensor:
        count, mean, var = _statistics(group, x)
        if module.running_mean is not None:
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        if module.running_var is not None:
            module.running_var.lerp_((var * (count / (count - 1))).to(module.running_var.dtype), momentum)
        computed = _computing_dtype(x)
        mean, inverse = mean.to(computed), torch.rsqrt(var + module.eps).to(computed)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        y = (x - _channels(mean, x)) * _channels(inverse if weight is None else inverse * weight, x)
        if bias is not None:
            y += _channels(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        h = (x - _channels(mean, x)) * _channels(inverse, x)
        dims = _all_but_channels(x)
        own = torch.stack([grad.sum(dims), (grad * h).sum(dims)])
        d_x = None
        if ctx.needs_input_grad[0]:
            d_bias, d_weight = ctx.group.all_reduce_scalar(own) / count.to(own.dtype)
            d_x = grad - _channels(d_bias, x) - h * _channels(d_weight, x)
            d_x = (d_x * _channels(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        d_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = own[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return d_x, d_weight, d_bias, None, None, None


class _ByKernels(torch.autograd.Function):
    """The same by the kernels of torch's `SyncBatchNorm`; unlike there the host reads no counts from the GPU."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, group: Group, module: _Norm, momentum: float
    ) -> Tensor:
        x, own, channels = dense(x), x.numel() // x.size(1), x.size(1)
        count = x.new_full((1,), own or _NO_EXAMPLES, dtype=_computing_dtype(x))
        row = torch.cat([*(torch.batch_norm_stats(x, module.eps) if own else [count.new_ones(channels)] * 2), count])
        every = row.new_empty(group.size, 2 * channels + 1)
        group.transport.all_gather(list(every), row, group.ranks).wait()
        means, inverses, counts = every.split([channels, channels, 1], 1)
        _require_values(x, counts)
        kept = module.running_mean, module.running_var
        running_mean, running_var = (None if each is None else each.to(row.dtype) for each in kept)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means, means, inverses, running_mean, running_var, momentum, module.eps, counts.view(-1)
        )
        for old, new in zip(kept, (running_mean, running_var), strict=True):
            if old is not None and new is not None and old is not new:
                old.copy_(new)
        ctx.save_for_backward(x, weight, mean, inverse, counts.view(-1).int())
        ctx.group = group
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, module.eps) if own else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, counts = ctx.saved_tensors
        grad, needed, d_x = dense(grad), ctx.needs_input_grad[:3], None
        if x.numel():
            *sums, d_weight, d_bias = torch.batch_norm_backward_reduce(grad, x, mean, inverse, weight, *needed)
        else:
            *sums, d_weight, d_bias = [torch.zeros_like(mean)] * 4
        if needed[0]:
            total = torch.cat(sums)
            ctx.group.transport.all_reduce(total, ctx.group.ranks).wait()
            d_x, scale = torch.empty_like(x), None if weight is None else weight.to(mean.dtype)
            sum_dy, sum_dy_xmu = total.chunk(2)
            if x.numel():
                d_x = torch.batch_norm_backward_elemt(grad, x, mean, inverse, scale, sum_dy, sum_dy_xmu, counts)
        return d_x, d_weight if needed[1] else None, d_bias if needed[2] else None, None, None, None


def _statistics(group: Group, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of values, mean and biased variance of each channel over all members, in float64.

    The members' sums of squares travel in float64, made of their own means and variances: so the sum over members
    loses nothing of a small variance around a large mean.
    """
    channels = x.size(1)
    own = x.numel() // channels  # values of one channel
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if own:
        var, mean = torch.var_mean(x.to(_computing_dtype(x)), _all_but_channels(x), correction=0)
        var, mean = var.double(), mean.double()
        sums = torch.cat([own * mean, own * (var + mean * mean), sums.new_full((1,), own)])
    sums = group.all_reduce_scalar(sums)
    count = sums[-1]
    _require_values(x, count)
    mean = sums[:channels] / count
    return count, mean, (sums[channels:-1] / count - mean * mean).clamp(min=0)


def _require_values(x: Tensor, counts: Tensor) -> None:
    if x.numel() < 2 * x.size(1) and counts.sum() < 2:  # read where this rank's own do not suffice
        raise ValueError(f"BatchNorm of {describe(x)} in training needs more than one value per channel in all members")


def _computing_dtype(x: Tensor) -> torch.dtype:
    """What torch computes the statistics of `x` in."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, (C,), to be used with `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))
