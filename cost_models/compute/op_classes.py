"""What kind of work an op is, so that it is priced at the rate that such ops reach.

What has a FLOP formula is a convolution, attention or a matrix product; the rest is bound by memory, but not all of it
alike: a processor that adds two tensors as fast as it reads them takes many times as long for a pool, an exponential
or a random number.  Those have classes of their own, which are "memory" where a device has no number for them.
An op that `ir/torch_ops.py` does not have is priced by its bytes too, and `known` tells that this is a guess.
"""

from __future__ import annotations

import torch

from splitc.cost_models.compute.op_bytes import name_of
from splitc.ir.torch_ops import ops_with


def op_class(func: torch._ops.OpOverload, computes: bool) -> str:
    """The class of an op; `computes`: it has a FLOP formula."""
    name = name_of(func)
    if computes:
        return "conv" if "conv" in name else "attention" if "attention" in name else "matmul"
    word = name.removeprefix("_")
    if word in _MATH:
        return "math"
    if word in _RANDOM:
        return "random"
    if "batch_norm" in word:
        return "batch_norm"
    if "_pool" in word or word.startswith(("upsample", "grid_sampler")):
        return "max_pool" if "max" in word else "pool"
    return "memory"


def known(func: torch._ops.OpOverload) -> bool:
    """Whether an op without a FLOP formula is known to be bound by memory."""
    name = name_of(func)
    if "::" in name:
        return False
    if torch.Tag.pointwise in func.tags or torch.Tag.inplace_view in func.tags or op_class(func, False) != "memory":
        return True
    word = name.removeprefix("_")
    for ending in ("_copy", "_backward_data", "_backward", "_forward"):
        word = word.removesuffix(ending)
    return word in _BY_MEMORY or word.startswith(("foreach_", "fused_"))


_RANDOM, _MATH, _BY_MEMORY = ops_with("random"), ops_with("math"), ops_with("memory")
