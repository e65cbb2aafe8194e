"""Independent subnet training in one process, from the paper's algorithms 1 and 2, with membership indicators as masks.

Written apart from splitc: networks are functions of whole weights and of a site's indicators, formula (2) without its
factor, which a normalisation undoes (IST 3.3); optimizers are torch's, on whole tensors, for each site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Masks = Mapping[str, Tensor]
"""Hidden layer -> 1 for the neurons of a site, 0 for others."""
Weights = dict[str, Tensor]
Axes = tuple[tuple[str | int, ...], ...]
"""For each dim of a weight, whose neurons lie along it, one layer after the other; a number: of so many of no layer."""


@dataclass
class Network:
    """A model to compile, and the same by masks.  axes: of the weights with neurons; others are held whole."""

    model: nn.Module
    masked: Callable[[Weights, Tensor, Masks], Tensor]
    axes: Mapping[str, Axes]

    @property
    def widths(self) -> dict[str, int]:
        """Hidden layer -> its neurons."""
        shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        return {
            str(axis[0]): shapes[name][dim]
            for name, axes in self.axes.items()
            for dim, axis in enumerate(axes)
            if len(axis) == 1 and isinstance(axis[0], str)
        }


def norm(w: Weights, name: str, value: Tensor) -> Tensor:
    """BatchNorm over the batch."""
    deviation = (value.var(0, unbiased=False) + 1e-5).sqrt()
    return (value - value.mean(0)) / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w: Weights, name: str, value: Tensor) -> Tensor:
    product = value @ w[f"{name}.weight"].T
    return product + w[f"{name}.bias"] if f"{name}.bias" in w else product


def of_linear(name: str, rows: Sequence[str | int] = (), columns: Sequence[str | int] = ()) -> dict[str, Axes]:
    """The axes of a linear layer: whose neurons it computes, and whose it reads."""
    return {f"{name}.weight": (tuple(rows), tuple(columns)), f"{name}.bias": (tuple(rows),)}


def of_norm(name: str, layer: str) -> dict[str, Axes]:
    return {f"{name}.weight": ((layer,),), f"{name}.bias": ((layer,),)}


@dataclass
class Trained:
    """Whole weights and optimizer states after each round; each site's loss of every step."""

    weights: list[Weights]
    states: list[dict[str, dict[str, Tensor]]]
    losses: list[list[float]]


def train_subnets(
    network: Network,
    steps: Sequence[Sequence[Sequence[tuple[Tensor, Tensor]]]],
    rounds: Sequence[int],
    indicators: Callable[[int, int], Masks],
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    clip_norm: float | None = None,
) -> Trained:
    """Algorithm 1.

    steps: update, site -> its batches, which are accumulated.  rounds: the updates of each.  indicators: of a round and
    a site.
    """
    whole = {name: p.detach().clone() for name, p in network.model.named_parameters()}
    state: dict[str, dict[str, Tensor]] = {}
    sites = len(steps[0])
    trained = Trained([], [], [[] for _ in range(sites)])
    for number, (first, last) in enumerate(pairwise(accumulate(rounds, initial=0))):
        updates = steps[first:last]
        examples = [sum(len(x) for update in updates for x, _ in update[site]) for site in range(sites)]
        masks = [indicators(number, site) for site in range(sites)]
        results = []
        for site in range(sites):
            own = {name: w.clone().requires_grad_() for name, w in whole.items()}
            local = optimizer(list(own.items()))
            for name, values in state.items():
                local.state[own[name]] = {key: value.clone() for key, value in values.items()}
            for update in updates:
                trained.losses[site] += local_update(network, own, masks[site], update[site], local, loss, clip_norm)
            kept = {name: dict(local.state[w]) for name, w in own.items() if w in local.state}
            results.append(({name: w.detach() for name, w in own.items()}, kept))
        whole, state = retrieved(network, whole, state, results, masks, [count / sum(examples) for count in examples])
        trained.weights.append(whole)
        trained.states.append(state)
    return trained


def local_update(
    network: Network,
    weights: Weights,
    masks: Masks,
    batches: Sequence[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    clip_norm: float | None,
) -> list[float]:
    """One iteration of algorithm 2, on the mean of the losses of these batches."""
    optimizer.zero_grad()
    losses = [loss(network.masked(weights, x, masks), y) for x, y in batches]
    (sum(losses, torch.zeros(())) / len(losses)).backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(list(weights.values()), clip_norm)
    optimizer.step()
    return [float(value.detach()) for value in losses]


def retrieved(
    network: Network,
    whole: Weights,
    state: Mapping[str, Mapping[str, Tensor]],
    results: Sequence[tuple[Weights, dict[str, dict[str, Tensor]]]],
    masks: Sequence[Masks],
    shares: Sequence[float],
) -> tuple[Weights, dict[str, dict[str, Tensor]]]:
    """Lines 13 to 19 of algorithm 1: each weight from the site that had it; what all had is averaged."""

    def together(name: str, before: Tensor, values: Sequence[Tensor]) -> Tensor:
        have = [membership(network.axes.get(name, ()), before, members) for members in masks]
        mean = torch.stack([share * value for share, value in zip(shares, values, strict=True)]).sum(0)
        after = torch.where(torch.stack(have).all(0), mean, before)
        for value, mine in zip(values, have, strict=True):
            alone = mine & (torch.stack(have).sum(0) == 1)
            after[alone] = value[alone]
        return after

    weights = {name: together(name, before, [r[0][name] for r in results]) for name, before in whole.items()}
    states = {}
    for name, first in results[0][1].items():
        states[name] = {
            key: together(
                name, state.get(name, {}).get(key, torch.zeros_like(value)), [r[1][name][key] for r in results]
            )
            if value.shape == whole[name].shape
            else value
            for key, value in first.items()
        }
    return weights, states


def membership(axes: Axes, weight: Tensor, masks: Masks) -> Tensor:
    """Which elements of a weight a site has: those that connect its neurons."""
    mine = torch.ones_like(weight, dtype=torch.bool)
    for dim, axis in enumerate(axes):
        if axis:
            parts = [torch.ones(layer) if isinstance(layer, int) else masks[layer] for layer in axis]
            mine &= torch.cat(parts).bool().view([-1 if d == dim else 1 for d in range(weight.dim())])
    return mine
