"""What the scripts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def parts(total: int, count: int) -> list[int]:
    """How many of `total` each of `count` has, as `Tensor.tensor_split` divides them."""
    return [total // count + (index < total % count) for index in range(count)]


class FlatSum:
    """The sum of parameters' gradients over the ranks of a group, in one all-reduce, under way until `wait`."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        self._gradients = [each.grad for each in parameters if each.grad is not None]
        self._flat = torch.cat([each.reshape(-1) for each in self._gradients])
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> None:
        """Return when the gradients are the sums."""
        self._work.wait()
        sums = self._flat.split([each.numel() for each in self._gradients])
        for gradient, total in zip(self._gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
