"""Data parallelism by torch's DistributedDataParallel with its default buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.by_hand.common import MakeOptimizer


class Ddp:
    """One rank; all have equally many examples."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, examples: Sequence[int] = ()) -> None:
        self._model, self._optimizer = model, optimizer(model.parameters())
        self._replica = DistributedDataParallel(model)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on this rank's examples of a global batch."""
        self._optimizer.zero_grad()
        F.cross_entropy(self._replica(images), labels).backward()
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """This rank's replica."""
        return self._model.state_dict()
