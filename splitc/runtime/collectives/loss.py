"""The loss over all ranks: a sum under way, and what a weighted mean divides by."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transport.base import Work


class Loss:
    """A global loss that may still be on its way."""

    def __init__(self, total: Tensor, work: Work, dtype: torch.dtype) -> None:
        self._total, self._work, self._dtype = total, work, dtype

    def wait(self) -> Tensor:
        """The loss, a 0-d tensor."""
        self._work.wait()
        return self._total.to(self._dtype)


def target_weight(target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The sum of the weights of `target`'s classes, 0-d: what `reduction="mean"` of a cross entropy divides by.

    target: class numbers of any shape.  weight: (classes,) or None for 1 each; the sum then is a whole number, so that
    a loss divided by it keeps its dtype.  Targets of `ignore_index` weigh nothing.
    """
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.where(counted, torch.zeros_like(target))].where(counted, weight.new_zeros(())).sum()
