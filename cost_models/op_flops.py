"""FLOPs of the ops that multiply matrices: a multiply-add is two.

torch knows the formulas of most (`torch.utils.flop_counter`).  Here are those that it lacks, or counts otherwise: a
convolution's backward with groups, the attention of CPUs, recurrent layers as one kernel, products with a vector.
Attention counts all pairs of positions, also where a causal mask hides half of them.

Vector units and tensor cores make the channels of a convolution in blocks: `filling` is what they compute besides, of
channels that are not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def formula_of(func: torch._ops.OpOverload) -> Callable[..., float] | None:
    """`formula(args, kwargs, out)` of an op; None for one that has none."""
    name = str(func._schema.name)
    if name in _OWN:
        return _OWN[name]
    known = flop_registry.get(func.overloadpacket)
    if known is None:
        return None
    return lambda args, kwargs, out: float(known(*args, **kwargs, out_val=out))


def filling(func: torch._ops.OpOverload, args: Sequence[Any], flops: float) -> float:
    """FLOPs that fill up the last block of channels that a convolution makes, where it makes less than a block."""
    name = str(func._schema.name)
    if name == "aten::convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        made = [_channels(weight, groups, transposed)]
    elif name == "aten::convolution_backward":
        weight, transposed, groups, mask = args[2], args[7], args[9], args[10]
        made = [_channels(weight, groups, bool(transposed) != (k == 0)) for k in range(2) if mask[k]]
    else:
        return 0.0
    if groups > 1 and weight.shape[1] == 1:  # depthwise: a vector goes along the image
        return 0.0
    return sum(flops / len(made) * (-(-n // _BLOCK) * _BLOCK / n - 1) for n in made)


_BLOCK = 16


def _channels(weight: torch.Tensor, groups: int, inwards: bool) -> int:
    """Channels of a group that a product with the weight makes: inwards, those of its second dim."""
    return int(weight.shape[1] if inwards else weight.shape[0] // groups)


def _convolution(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    x, weight, transposed = args[0], args[1], args[6]
    return _products(x if transposed else out, weight)


def _convolution_backward(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    """The gradients of input and weight each take as much as forward, where they are asked for."""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return (mask[0] + mask[1]) * _products(x if transposed else grad, weight)


def _products(positions: torch.Tensor, weight: torch.Tensor) -> float:
    """Every number of `positions` meets the weights of its group: weight is (out, in / groups, *kernel)."""
    return 2.0 * positions.numel() * math.prod(weight.shape[1:])


def _attention(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return float(sdpa_flop_count(*(each.shape for each in args[:3])))


def _attention_backward(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return float(sdpa_backward_flop_count(*(each.shape for each in args[:4])))


def _onednn_recurrent(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    """One layer in one direction: every step of every sequence meets both matrices of the gates."""
    return 2.0 * math.prod(args[0].shape[:-1]) * (args[1].numel() + args[2].numel())


def _cudnn_recurrent(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return 2.0 * math.prod(args[0].shape[:-1]) * sum(each.numel() for each in args[1] if each.dim() == 2)


def _matrix_vector(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return 2.0 * next(each for each in args if each.dim() == 2).numel()


def _dot(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return 2.0 * float(args[0].numel())


def _summed_products(args: Sequence[Any], kwargs: Any, out: Any) -> float:
    return 2.0 * args[1].numel() * args[2].shape[-1]


def _twice(formula: Callable[..., float]) -> Callable[..., float]:
    return lambda args, kwargs, out: 2 * formula(args, kwargs, out)


_OWN: dict[str, Callable[..., float]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::mkldnn_rnn_layer": _onednn_recurrent,
    "aten::mkldnn_rnn_layer_backward": _twice(_onednn_recurrent),
    "aten::_cudnn_rnn": _cudnn_recurrent,
    "aten::_cudnn_rnn_backward": _twice(_cudnn_recurrent),
    "aten::mv": _matrix_vector,
    "aten::addmv": _matrix_vector,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::addbmm": _summed_products,
}
