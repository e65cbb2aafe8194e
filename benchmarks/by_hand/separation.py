"""Layer separation with microbatches: all ranks but the last train the convolutions, the last one the classifier.

They part before `avgpool`, which may make more values of them.  A trunk rank computes and sends its pieces one after
the other, then takes their gradients back in the same order; the head trains each piece as soon as all of it is there.
Receives are posted before anything is computed, and sends are waited for at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.by_hand.common import FlatSum, MakeOptimizer, parts
from examples.alexnet import AlexNet


class Separation:
    """One rank of a trunk or the head.  examples: of each rank, none of the head; each has `microbatches` pieces."""

    def __init__(
        self,
        model: AlexNet,
        optimizer: MakeOptimizer,
        examples: Sequence[int],
        microbatches: int,
    ) -> None:
        self._model, self._total = model, sum(examples)
        self._head = dist.get_world_size() - 1
        self._trunk = dist.new_group(list(range(self._head)))
        self._pieces = [parts(count, microbatches) for count in examples[: self._head]]
        self._one: Tensor | None = None  # what travels of an example
        self._is_head = dist.get_rank() == self._head
        self._optimizer = optimizer((model.classifier if self._is_head else model.features).parameters())

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on this rank's examples of a global batch; the head has none."""
        self._optimizer.zero_grad()
        if self._one is None:
            with torch.no_grad():
                self._one = self._model.features(images.new_zeros(1, *images.shape[1:]))[0]
        sends = self._classify(self._one) if self._is_head else self._convolve(self._one, images, labels)
        self._optimizer.step()
        for send in sends:
            send.wait()

    def _convolve(self, one: Tensor, images: Tensor, labels: Tensor) -> list[Any]:
        pieces = self._pieces[dist.get_rank()]
        gradients = [one.new_empty(count, *one.shape) for count in pieces]
        receives = [_irecv(gradient, self._head, k) for k, gradient in enumerate(gradients)]
        sends, outputs = [], []
        for k, (some, classes) in enumerate(zip(images.split(pieces), labels.split(pieces), strict=True)):
            outputs.append(self._model.features(some))
            sends += [_isend(outputs[k].detach(), self._head, 2 * k), _isend(classes, self._head, 2 * k + 1)]
        for receive, output, gradient in zip(receives, outputs, gradients, strict=True):
            receive.wait()
            output.backward(gradient)
        FlatSum(self._model.features.parameters(), self._trunk).wait()
        return sends

    def _classify(self, one: Tensor) -> list[Any]:
        arriving = []
        for k, counts in enumerate(zip(*self._pieces, strict=True)):
            x = one.new_empty(sum(counts), *one.shape)
            labels = torch.empty(sum(counts), dtype=torch.long)
            receives = [
                _irecv(part, rank, tag)
                for whole, tag in ((x, 2 * k), (labels, 2 * k + 1))
                for rank, part in enumerate(whole.split(counts))
            ]
            arriving.append((x, labels, counts, receives))
        sends = []
        for k, (x, labels, counts, receives) in enumerate(arriving):
            for receive in receives:
                receive.wait()
            output = self._model.classifier(self._model.avgpool(x.requires_grad_()).flatten(1))
            (F.cross_entropy(output, labels, reduction="sum") / self._total).backward()
            assert x.grad is not None
            sends += [_isend(part, rank, k) for rank, part in enumerate(x.grad.split(counts))]
        return sends

    def state(self) -> dict[str, Tensor]:
        """The weights of the convolutions from the first rank, those of the classifier from the head."""
        states: list[Any] = [None] * (self._head + 1)
        dist.all_gather_object(states, self._model.state_dict())
        return {name: states[self._head if name.startswith("classifier") else 0][name] for name in states[0]}


def _isend(tensor: Tensor, rank: int, tag: int) -> Any:
    return dist.isend(tensor, rank, tag=tag)


def _irecv(tensor: Tensor, rank: int, tag: int) -> Any:
    return dist.irecv(tensor, rank, tag=tag)
