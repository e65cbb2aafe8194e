"""The loss over all ranks: its all-reduce, and the denominator of a weighted mean."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transport.base import Ranks, Transport
from ..transport.messages import Arriving


def start_sum(
    transport: Transport, contribution: Tensor, ranks: Ranks | None = None, dtype: torch.dtype = torch.float64
) -> Arriving:
    """Start to sum 0-d contributions of `ranks`, by default all, in `dtype`; the total has their own."""
    ranks = tuple(range(transport.world)) if ranks is None else ranks
    total = contribution.detach().to(transport.device, dtype, copy=True)
    return Arriving(transport.all_reduce(total, ranks), lambda: total.to(contribution.dtype))


def target_weight(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The sum of the weights of `target`'s classes, 0-d: what `reduction="mean"` of a cross entropy divides by.

    target: class numbers of any shape.  weight: (classes,), or None for 1 each; the sum then is an integer, so that a
    loss divided by it keeps its dtype.  Targets of `ignore_index` have weight 0.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.where(counted, torch.zeros_like(target))].where(counted, weight.new_zeros(())).sum()
