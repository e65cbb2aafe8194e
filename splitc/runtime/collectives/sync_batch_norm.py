"""BatchNorm over the examples of all members of a group, exact in value and gradient.

With the sums taken over all N values of a channel, on all members:

    mean = sum x / N        var = sum (x - mean)^2 / N        h = (x - mean) / sqrt(var + eps)
    y = weight h + bias
    dx = weight / sqrt(var + eps) (dy - sum dy / N - h sum(dy h) / N)

Forward needs one all-reduce of 2C + 1 numbers and backward one of 2C.  Each member's batch counts by its size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm as _Norm

from ..transport.base import describe
from .model_parallel import Group


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
    y: Tensor = _BatchNorm.apply(x, *affine, group, module, momentum)  # type: ignore[no-untyped-call]
    return y


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
    if own < 2 and count < 2:
        raise ValueError(f"BatchNorm of {describe(x)} in training needs more than one value per channel in all members")
    mean = sums[:channels] / count
    return count, mean, (sums[channels:-1] / count - mean * mean).clamp(min=0)


def _computing_dtype(x: Tensor) -> torch.dtype:
    """What torch computes the statistics of `x` in."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, (C,), to be used with `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))
