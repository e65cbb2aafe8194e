"""Random losses: means and sums of examples, of the batch as a whole, of several outputs, of the output alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -- of scores and classes ---------------------------------------------------------------------------------------------


def _ignoring(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, ignore_index=0)


def _masked(scores: Tensor, target: Tensor) -> Tensor:
    mask = (target > 0).to(scores.dtype)
    return (F.cross_entropy(scores, target, reduction="none") * mask).sum() / (mask.sum() + 1)


def _weighted(scores: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, scores.size(-1), dtype=scores.dtype)
    return F.cross_entropy(scores, target, weight=weight)


def _sum(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, reduction="sum") / 7


def _squares(scores: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(scores, F.one_hot(target, scores.size(-1)).to(scores.dtype))


def _several(scores: Tensor, target: Tensor) -> Tensor:
    kept = (target != 1).to(scores.dtype)
    part = (scores.logsumexp(1) * kept).sum() / kept.sum()
    return F.cross_entropy(scores, target) + 0.1 * scores.pow(2).mean() + 0.01 * scores.abs().sum() + part


def _smoothed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target, label_smoothing=0.1) + F.huber_loss(scores[:, 0], target.to(scores.dtype))


LOSSES: tuple[Callable[..., Tensor], ...] = (
    F.cross_entropy,
    _ignoring,
    _masked,
    _weighted,
    _sum,
    _squares,
    _several,
    _smoothed,
)


def _relative(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target) / F.cross_entropy(scores, target).detach()


def _annealed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores, target) * torch.exp(-F.cross_entropy(scores, target).detach())


def _balanced(scores: Tensor, target: Tensor) -> Tensor:
    entropy, size = F.cross_entropy(scores, target), scores.pow(2).mean()
    return entropy + size * (entropy.detach() / (size.detach() + 1e-3))


def _normalised(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores, target, reduction="none")
    weight = torch.softmax(each.detach(), 0)
    return (each * weight).sum()


def _above_the_mean(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores, target, reduction="none")
    return torch.where(each > each.detach().mean(), each, 0.5 * each).mean()


def _bounded(scores: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(scores, target)
    return torch.where(total > 1.6, total, 0.5 * total**2)


def _branching(scores: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(scores, target)
    return total if float(total.detach()) > 1.6 else 0.5 * total**2


def _focal(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores, target, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def _dice(scores: Tensor, target: Tensor) -> Tensor:
    found, wanted = scores.softmax(-1), F.one_hot(target, scores.size(-1)).to(scores.dtype)
    return 1 - ((2 * (found * wanted).sum(0) + 1) / (found.sum(0) + wanted.sum(0) + 1)).mean()


def _hardest(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores, target, reduction="none")
    return each.topk(len(each) // 2 + 1).values.mean()


def _picked(scores: Tensor, target: Tensor) -> Tensor:
    return -F.log_softmax(scores, -1)[torch.arange(len(target)), target].mean()


def _selected(scores: Tensor, target: Tensor) -> Tensor:
    kept = target > 0
    return F.cross_entropy(scores[kept], target[kept], reduction="sum") / len(target)


def _similar(scores: Tensor, target: Tensor) -> Tensor:
    same = (target[:, None] == target[None, :]).to(scores.dtype)
    unit = F.normalize(scores, dim=-1)
    return F.mse_loss(unit @ unit.t(), same)


LABELLED: tuple[Callable[..., Tensor], ...] = (
    *(_relative, _annealed, _balanced, _normalised, _above_the_mean, _bounded, _branching, _focal, _dice, _hardest),
    *(_picked, _selected, _similar),
)
REFUSED = (_hardest,)
"""How many examples it takes is no multiple of the batch."""

# -- of the output alone -----------------------------------------------------------------------------------------------


def _energy(scores: Tensor, target: Tensor | None) -> Tensor:
    return scores.logsumexp(-1).mean() + 0.1 * scores.pow(2).mean()


def _entropy(scores: Tensor, target: Tensor | None) -> Tensor:
    return -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean()


def _spread(scores: Tensor, target: Tensor | None) -> Tensor:
    return F.relu(1 - torch.sqrt(scores.var(0, unbiased=False) + 1e-4)).mean() + scores.mean(0).pow(2).mean()


def _critic(scores: Tensor, target: Tensor | None) -> Tensor:
    return scores[:, 0].mean() - scores[:, 1].sigmoid().mean()


UNLABELLED: tuple[Callable[..., Tensor], ...] = (_energy, _entropy, _spread, _critic)


# -- of several outputs ------------------------------------------------------------------------------------------------


def _agreeing(first: Tensor, other: Tensor) -> Tensor:
    return F.mse_loss(first, other.detach()) + F.mse_loss(first.detach(), other)


def _larger(first: Tensor, other: Tensor) -> Tensor:
    return torch.where(first > other, first - other, 0.3 * (other - first)).mean()


def _divergence(first: Tensor, other: Tensor) -> Tensor:
    return F.kl_div(first.log_softmax(-1), other.softmax(-1), reduction="batchmean")


PAIRS = (None, _agreeing, _larger, _divergence)


@dataclass
class Loss:
    """A loss of all scores; pair: of the first and each other.  model: whose weights are penalised, as in a closure."""

    of: Callable[..., Tensor]
    model: list[nn.Module] = field(default_factory=list)
    pair: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, scores: Any, target: Tensor | None = None) -> Tensor:
        several = tuple(scores.values()) if isinstance(scores, dict) else scores
        first, *others = several if isinstance(several, tuple) else (several,)
        goal = None if target is None else target.flatten()
        total = self.of(first.flatten(0, -2), goal)
        for each in others:
            if self.pair is not None:
                total = total + 0.3 * self.pair(first, each)
            elif goal is not None:
                total = total + 0.4 * F.cross_entropy(each.flatten(0, -2), goal)
        for model in self.model:
            total = total + 1e-3 * model.get_parameter("head.weight").pow(2).sum()
        return total
