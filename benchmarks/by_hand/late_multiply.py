"""Late multiply: in place of the classifier's gradients, which are large, its inputs X and errors E travel.

X and E of all linear layers are packed side by side into one all-gather, which is issued before the convolutions'
backward; every rank multiplies E^T X of the whole batch while the convolutions' gradients are all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.by_hand.common import FlatSum, MakeOptimizer
from examples.alexnet import AlexNet


class LateMultiply:
    """One rank; all have equally many examples."""

    def __init__(self, model: AlexNet, optimizer: MakeOptimizer, examples: Sequence[int]) -> None:
        self._model, self._optimizer, self._total = model, optimizer(model.parameters()), sum(examples)
        self._linears = [layer for layer in model.classifier if isinstance(layer, nn.Linear)]

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on this rank's examples of a global batch."""
        self._optimizer.zero_grad()
        features = self._model.avgpool(self._model.features(images)).flatten(1)
        gradient, sides = self._classify(features.detach(), labels)
        packed = torch.cat(sides, 1)
        gathered = packed.new_empty(self._total, packed.shape[1])
        gather = dist.all_gather_into_tensor(gathered, packed, async_op=True)
        features.backward(gradient)
        reduced = FlatSum(self._model.features.parameters())
        gather.wait()
        columns = iter(gathered.split([side.shape[1] for side in sides], 1))
        for layer, x, error in zip(self._linears, columns, columns, strict=True):
            layer.weight.grad, layer.bias.grad = error.T @ x, error.sum(0)
        reduced.wait()
        self._optimizer.step()

    def _classify(self, x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The gradient of the features x (b, n), and X and E of every linear layer, in turns."""
        value, pairs = x.requires_grad_(), []
        for layer in self._model.classifier:
            if isinstance(layer, nn.Linear):
                before, value = value, F.linear(value, layer.weight.detach(), layer.bias.detach())
                value.retain_grad()
                pairs.append((before, value))
            else:
                value = layer(value)
        (F.cross_entropy(value, labels, reduction="sum") / self._total).backward()
        sides = [side for before, after in pairs for side in (before.detach(), after.grad)]
        assert x.grad is not None
        return x.grad, [side for side in sides if side is not None]

    def state(self) -> dict[str, Tensor]:
        """This rank's replica."""
        return self._model.state_dict()
