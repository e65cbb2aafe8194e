"""Data parallelism by torch's DistributedDataParallel with its default buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.by_hand.common import MakeOptimizer


class Ddp:
    """One rank; all have equally many examples.  loss: the mean over examples, of the output and the target."""

    sparse = False  # gradients of embedding tables

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        examples: Sequence[int] = (),
        loss: Callable[..., Tensor] = F.cross_entropy,
    ) -> None:
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = self.sparse
        self._model, self._optimizer, self._loss = model, optimizer(model.parameters()), loss
        self._replica = DistributedDataParallel(model)

    def step(self, *batch: Tensor) -> None:
        """Train on this rank's examples of a global batch: the model's inputs, and the target."""
        *inputs, target = batch
        self._optimizer.zero_grad()
        self._loss(self._replica(*inputs), target).backward()
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """This rank's replica."""
        return self._model.state_dict()


class SparseDdp(Ddp):
    """The same with embedding tables whose gradients are sparse: the rows that a rank read travel, and are updated.

    Where the tables are most of the parameters this is what is trained with.  optimizer: one that takes sparse
    gradients: SGD without momentum, SparseAdam, Adagrad.
    """

    sparse = True
