"""Units that train by themselves and average, in one process and by hand: what plans with rounds are to be equal to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.ranks import sgd


def plain_sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def parts(batch: Sequence[Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The examples of each unit in a global batch."""
    return list(zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True))


def exchanged(model: nn.Module) -> dict[str, Tensor]:
    """What units average: trained parameters, and statistics of normalisations, in the order of the modules."""
    statistics = {n: b for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))}
    return {**{n: p.data for n, p in model.named_parameters() if p.requires_grad}, **statistics}


def mean(units: Sequence[nn.Module], name: str, weights: Sequence[float]) -> Tensor:
    """The weighted mean of a tensor over the units."""
    total = sum(weights)
    return sum((exchanged(unit)[name] * (w / total) for unit, w in zip(units, weights, strict=True)), torch.tensor(0.0))


def average(units: Sequence[nn.Module], weights: Sequence[float]) -> None:
    """Give every unit the weighted mean of all."""
    for name in exchanged(units[0]):
        value = mean(units, name, weights)
        for unit in units:
            exchanged(unit)[name].copy_(value)


def train_units(
    model: nn.Module,
    batches: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    period: int,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    loss: Callable[..., Tensor] = F.cross_entropy,
    clip_norm: float | None = None,
    accumulate: int = 1,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Each unit's losses, and the state after the units were averaged each `period` updates and at the very end.

    sizes: of each batch, the examples of each unit.
    """
    units = [copy.deepcopy(model) for _ in sizes[0]]
    optimizers = [optimizer(list(unit.named_parameters())) for unit in units]
    losses: list[list[float]] = [[] for _ in units]
    weights = [0.0] * len(units)
    for k, (batch, shares) in enumerate(zip(batches, sizes, strict=True)):
        for unit, own, updates, found in zip(units, parts(batch, shares), optimizers, losses, strict=True):
            if k % accumulate == 0:
                updates.zero_grad()
            value = loss(unit(own[0]), *own[1:]) if own[1:] else unit(own[0])
            (value / accumulate).backward()
            found.append(float(value.detach()))
            if (k + 1) % accumulate == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(unit.parameters(), clip_norm, foreach=False)
                updates.step()
        weights = [w + n for w, n in zip(weights, shares, strict=True)]
        if (k + 1) % (accumulate * period) == 0 or k == len(batches) - 1:
            average(units, weights)
            weights = [0.0] * len(units)
    return losses, {key: tensor.detach().clone() for key, tensor in units[0].state_dict().items()}
