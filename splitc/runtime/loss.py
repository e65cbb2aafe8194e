"""Weights of targets: the denominator of a weighted mean."""

from __future__ import annotations

import torch


def target_weight(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """The sum of the weights of `target`'s classes, 0-d: what `reduction="mean"` of a cross entropy divides by.

    target: class numbers of any shape.  weight: (classes,) or None for 1 each.  Targets of `ignore_index` weigh nothing.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(torch.get_default_dtype())
    return weight[target.where(counted, torch.zeros_like(target))].where(counted, weight.new_zeros(())).sum()
