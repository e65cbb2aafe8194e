"""Random models that see two views of each example, with losses over the batch: contrastive, bootstrapped."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_blocks import CLASSES, WIDTH, block

# -- losses: of two projections and a class for each example -----------------------------------------------------------


def _nt_xent(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    n = a.size(0)
    f = F.normalize(torch.cat([a, b]), dim=1)
    similar = (f @ f.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def _nt_xent_rolled(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    f = F.normalize(torch.cat([a, b], 0), dim=1)
    n = f.shape[0] // 2
    logits = torch.exp(f @ f.t())
    others = (logits * (1 - torch.eye(2 * n, dtype=f.dtype))).sum(1)
    same = torch.cat([torch.diag(logits, n), torch.diag(logits, -n)])
    return -torch.log(same / others).mean()


def _clip(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    logits = 2 * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t()
    same = torch.arange(len(logits))
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2


def _sup_con(a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    f = F.normalize(torch.stack([a, b], 1), dim=-1)
    n, views = f.shape[:2]
    f = torch.cat(torch.unbind(f, 1), 0)
    same = torch.eq(target.view(-1, 1), target.view(1, -1)).to(f.dtype).repeat(views, views)
    others = torch.scatter(torch.ones_like(same), 1, torch.arange(n * views).view(-1, 1), 0)
    logits = f @ f.t()
    logits = logits - logits.max(1, keepdim=True).values.detach()
    chance = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((same * others * chance).sum(1) / (same * others).sum(1)).mean()


def _barlow(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    n = a.shape[0]
    a, b = ((each - each.mean(0)) / (each.std(0) + 1e-2) for each in (a, b))
    c = a.T @ b / n
    on = (torch.diagonal(c) - 1).pow(2).sum()
    return on + 0.1 * (c - torch.diag(torch.diagonal(c))).pow(2).sum()


def _vic_reg(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    total = F.mse_loss(a, b)
    for each in (a, b):
        total = total + F.relu(1 - torch.sqrt(each.var(0) + 1e-4)).mean()
        centred = each - each.mean(0)
        c = centred.t() @ centred / (each.size(0) - 1)
        total = total + 0.1 * (c.pow(2).sum() - c.diagonal().pow(2).sum()) / each.size(1)
    return total


def _hard_triplet(a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    f, labels = torch.cat([a, b]), torch.cat([target, target])
    far = torch.cdist(f, f)
    same = labels[:, None] == labels[None, :]
    positive = (far * same).amax(1)
    negative = far.masked_fill(same, 1e4).amin(1)
    return F.relu(positive - negative + 0.5).mean() + 0.01 * f.pow(2).mean()


def _rolled_triplet(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return F.triplet_margin_loss(a, b, b.roll(1, 0))


def _cosine(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    return -F.cosine_similarity(a, b.detach(), dim=-1).mean() / 2 - F.cosine_similarity(b, a.detach()).mean() / 2


def _centred(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    teacher = F.softmax((b - b.mean(0, keepdim=True)).detach() / 0.5, -1)
    return -(teacher * F.log_softmax(a, -1)).sum(-1).mean()


LOSSES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    *(_nt_xent, _nt_xent_rolled, _clip, _sup_con, _barlow, _vic_reg, _hard_triplet, _rolled_triplet, _cosine, _centred),
)
_LABELLED = (_sup_con, _hard_triplet)

# -- models ------------------------------------------------------------------------------------------------------------


class Views(nn.Module):
    """Two views, given apart or in one tensor, of one encoder, of two, or of one and its moving average."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.other = choose.choice(["shared", "own", "averaged", "averaged"])
        self.apart, self.joint = choose.random() < 0.6, choose.random() < 0.4
        self.labelled = False
        blocks = [block(choose, "features", 2) for _ in range(choose.randint(1, 2))]
        self.encoder = nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))
        if self.other == "own":
            self.second = nn.Sequential(nn.Linear(4, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        elif self.other == "averaged":
            self.second = copy.deepcopy(self.encoder).requires_grad_(False)
        self.predictor = nn.Linear(WIDTH, WIDTH) if choose.random() < 0.3 else nn.Identity()
        self.spelling = choose.choice(["data", "lerp", "add", "copy"])

    @torch.no_grad()
    def average(self) -> None:
        """Move the second encoder's weights towards the first one's."""
        for own, moving in zip(self.encoder.parameters(), self.second.parameters(), strict=True):
            match self.spelling:
                case "data":
                    moving.data = moving.data * 0.9 + own.data * 0.1
                case "lerp":
                    moving.lerp_(own, 0.1)
                case "add":
                    moving.data.mul_(0.9).add_(own.data, alpha=0.1)
                case _:
                    moving.copy_(0.9 * moving + 0.1 * own)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if y is None:
            x, y = x[:, 0], x[:, 1]
        if self.other == "shared" and self.joint:
            a, b = self.encoder(torch.cat([x, y])).chunk(2)
        elif self.other == "averaged":
            if self.training:
                self.average()
            with torch.no_grad():
                b = self.second(y)
            a = self.encoder(x)
        else:
            a, b = self.encoder(x), (self.encoder if self.other == "shared" else self.second)(y)
        return self.predictor(a), b

    def batch(self, examples: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Two views that are alike, and classes where the loss takes them."""
        x = torch.randn(examples, 1, 4, dtype=torch.float64, generator=generator)
        both = x + 0.3 * torch.randn(examples, 2, 4, dtype=torch.float64, generator=generator)
        target = torch.randint(CLASSES, (examples,), generator=generator)
        inputs = (both[:, 0].clone(), both[:, 1].clone()) if self.apart else (both,)
        return inputs, target if self.labelled else None


class OfViews:
    """A loss of a pair of projections."""

    def __init__(self, of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.of = of

    def __call__(self, pair: tuple[Tensor, Tensor], *target: Tensor) -> Tensor:
        a, b = pair
        return self.of(a, b, target[0] if target else a)


def views(choose: random.Random) -> tuple[nn.Module, Any]:
    """A model of views and its loss."""
    of = choose.choice(LOSSES)
    model = Views(choose)
    model.labelled = of in _LABELLED or choose.random() < 0.3
    return model, OfViews(of)
