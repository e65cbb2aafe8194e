"""Every linear layer divided by rows: rank r has the columns of W that multiply its slice of the input features.

The channels of the convolutions go from examples to slices by an all-to-all, before `avgpool`, which may make more of
their values.  A product with a slice is a summand of the whole product; between two layers a reduce-scatter (an
all-to-all and a local sum) adds the summands up and leaves each rank its slice of the features, after the last layer
its examples.  No gradient of a matrix travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.by_hand.common import FlatSum, MakeOptimizer, parts
from examples.alexnet import AlexNet


def exchange(pieces: Sequence[Tensor], sizes: list[int]) -> Tensor:
    """Send piece r to rank r; return what the ranks sent here, flat, rank r's of `sizes[r]` numbers."""
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    arrived = sent.new_empty(sum(sizes))
    dist.all_to_all_single(arrived, sent, sizes, [piece.numel() for piece in pieces])
    return arrived


class ToSlices(torch.autograd.Function):
    """(b, n) of this rank's examples -> (B, n_r) of all examples.  rows, columns: of each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], columns: list[int]) -> Tensor:
        ctx.rows, ctx.columns = rows, columns
        own = columns[dist.get_rank()]
        return exchange(x.split(columns, 1), [b * own for b in rows]).view(-1, own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        b = ctx.rows[dist.get_rank()]
        sizes = [b * n for n in ctx.columns]
        arrived = exchange(gradient.split(ctx.rows), sizes).split(sizes)
        return torch.cat([part.view(b, -1) for part in arrived], 1), None, None


class SumToSlices(torch.autograd.Function):
    """(B, n) of summands -> (B, n_r) of sums; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: list[int]) -> Tensor:
        ctx.columns = columns
        shape = len(columns), len(x), columns[dist.get_rank()]
        return exchange(x.split(columns, 1), [shape[1] * shape[2]] * shape[0]).view(shape).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sizes = [len(gradient) * n for n in ctx.columns]
        arrived = exchange([gradient] * len(sizes), sizes).split(sizes)
        return torch.cat([part.view(len(gradient), -1) for part in arrived], 1), None


class SumToExamples(torch.autograd.Function):
    """(B, n) of summands -> (b, n) of sums; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int]) -> Tensor:
        ctx.rows = rows
        shape = len(rows), rows[dist.get_rank()], x.shape[1]
        return exchange(x.split(rows), [shape[1] * shape[2]] * shape[0]).view(shape).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        n = gradient.shape[1]
        return exchange([gradient] * len(ctx.rows), [b * n for b in ctx.rows]).view(-1, n), None


class Rows:
    """One rank.  examples: of each rank; features that the ranks do not divide go to the first ones."""

    def __init__(self, model: AlexNet, optimizer: MakeOptimizer, examples: Sequence[int]) -> None:
        self._model, self._examples = model, list(examples)
        linears = {k: layer for k, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)}
        self._last = max(linears)
        channels = [layer.out_channels for layer in model.features if isinstance(layer, nn.Conv2d)][-1]
        of_channel = linears[min(linears)].in_features // channels
        self._weights = {
            k: _own(layer.weight, 1, of_channel if k == min(linears) else 1) for k, layer in linears.items()
        }
        self._biases = {k: layer.bias if k == self._last else _own(layer.bias, 0) for k, layer in linears.items()}
        self._summed = [*model.features.parameters(), self._biases[self._last]]
        own = [*self._weights.values(), *self._biases.values()]
        self._optimizer = optimizer([*model.features.parameters(), *own])

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on this rank's examples of a global batch."""
        self._optimizer.zero_grad()
        x = self._model.features(images)
        channel = x.shape[2:]
        columns = [channels * channel.numel() for channels in _columns(x.shape[1])]
        x = ToSlices.apply(x.flatten(1), self._examples, columns)  # type: ignore[no-untyped-call]
        x = self._model.avgpool(x.view(len(x), -1, *channel)).flatten(1)
        for k, layer in enumerate(self._model.classifier):
            if k not in self._weights:
                x = layer(x)
                continue
            summands = F.linear(x, self._weights[k])
            if k == self._last:
                sums = SumToExamples.apply(summands, self._examples)  # type: ignore[no-untyped-call]
            else:
                sums = SumToSlices.apply(summands, _columns(summands.shape[1]))  # type: ignore[no-untyped-call]
            x = sums + self._biases[k]
        (F.cross_entropy(x, labels, reduction="sum") / sum(self._examples)).backward()
        FlatSum(self._summed).wait()
        self._optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """The whole weights, put together of all ranks' slices."""
        slices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            slices, [{k: each.detach() for k, each in part.items()} for part in (self._weights, self._biases)]
        )
        whole = self._model.state_dict()
        for k in self._weights:
            whole[f"classifier.{k}.weight"] = torch.cat([weights[k] for weights, _ in slices], 1)
            if k != self._last:
                whole[f"classifier.{k}.bias"] = torch.cat([biases[k] for _, biases in slices])
        return whole


def _columns(features: int) -> list[int]:
    """How many of the features each rank has."""
    return parts(features, dist.get_world_size())


def _own(parameter: Tensor, dim: int, of_channel: int = 1) -> nn.Parameter:
    """This rank's slice of a parameter, of whole channels with `of_channel` features each."""
    sizes = [channels * of_channel for channels in _columns(parameter.shape[dim] // of_channel)]
    return nn.Parameter(parameter.detach().split(sizes, dim)[dist.get_rank()].clone())
