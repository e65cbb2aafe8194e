"""FLOPs of the ops that multiply matrices: a multiply-add is two.

torch knows the formulas of most (`torch.utils.flop_counter`).  Here are those that it lacks, or counts otherwise: a
convolution's backward with groups, the attention of CPUs, recurrent layers as one kernel, products with a vector.
Attention counts all pairs of positions, also where a causal mask hides half of them.

Vector units and tensor cores compute the channels of a convolution in blocks of 16: `padding_flops` counts the FLOPs
that they spend on the padded channels of the last block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Formula = Callable[[Sequence[Any], Any, Any], float]
"""FLOPs of an op with these arguments, keyword arguments and output."""

_BLOCK = 16  # channels


def formula_of(func: torch._ops.OpOverload) -> Formula | None:
    """The formula of an op; None where there is none."""
    own = _OWN.get(str(func._schema.name))
    if own is not None:
        return lambda args, kwargs, out: float(own(args, out))
    known = flop_registry.get(func.overloadpacket)
    if known is not None:
        return lambda args, kwargs, out: float(known(*args, **kwargs, out_val=out))
    return None


def padding_flops(func: torch._ops.OpOverload, args: Sequence[Any], flops: float) -> float:
    """FLOPs that a convolution spends on padding its channels to whole blocks."""
    name = str(func._schema.name)
    if name == "aten::convolution":
        weight, transposed, groups = args[1], args[6], args[8]
        made = [_channels(weight, groups, transposed)]
    elif name == "aten::convolution_backward":
        weight, transposed, groups, (inputs, weights, _) = args[2], args[7], args[9], args[10]
        made = [_channels(weight, groups, not transposed)] * inputs + [_channels(weight, groups, transposed)] * weights
    else:
        return 0.0
    if groups > 1 and weight.shape[1] == 1:  # depthwise: its vectors go along the image
        return 0.0
    return sum(flops / len(made) * (_BLOCK * math.ceil(n / _BLOCK) / n - 1) for n in made)


def _channels(weight: Tensor, groups: int, second: bool) -> int:
    """Channels that a group makes: as many as its weight's second dim has, or its share of the first."""
    return weight.shape[1] if second else weight.shape[0] // groups


def _products(positions: Tensor, weight: Tensor) -> int:
    """Every number of `positions` meets the weights of its group: weight is (out, in / groups, *kernel)."""
    return 2 * positions.numel() * weight.shape[1:].numel()


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """The gradients of input and weight each take as much as forward, where they are asked for."""
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return (int(mask[0]) + int(mask[1])) * _products(x if transposed else grad, weight)


def _recurrent(x: Tensor, weights: Sequence[Tensor]) -> int:
    """Every step of every sequence meets the matrices of the gates."""
    return 2 * x.shape[:-1].numel() * sum(each.numel() for each in weights if each.dim() == 2)


_OWN: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "aten::convolution": lambda args, out: _products(args[0] if args[6] else out, args[1]),
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda args, out: sdpa_flop_count(
        *(each.shape for each in args[:3])
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, out: sdpa_backward_flop_count(
        *(each.shape for each in args[:4])
    ),
    "aten::mkldnn_rnn_layer": lambda args, out: _recurrent(args[0], args[1:3]),
    "aten::mkldnn_rnn_layer_backward": lambda args, out: 2 * _recurrent(args[0], args[1:3]),
    "aten::_cudnn_rnn": lambda args, out: _recurrent(args[0], args[1]),
    "aten::_cudnn_rnn_backward": lambda args, out: 2 * _recurrent(args[0], args[1]),
    "aten::mv": lambda args, out: 2 * args[0].numel(),
    "aten::addmv": lambda args, out: 2 * args[1].numel(),
    "aten::dot": lambda args, out: 2 * args[0].numel(),
    "aten::vdot": lambda args, out: 2 * args[0].numel(),
    "aten::addbmm": lambda args, out: 2 * args[1].numel() * args[2].shape[-1],
}
