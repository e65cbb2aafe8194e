"""Random models of ids: several tables in one tensor of indices, bags, towers; clicks, ranks and in-batch negatives."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_blocks import WIDTH, block

SIZES = (5, 3, 17, 40)


class Tables(nn.Module):
    """Tables of several sizes, all of whose ids stand in one tensor, beside dense features."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.sizes = choose.sample(SIZES, choose.randint(2, 4))
        self.bag, self.dots = choose.random() < 0.3, choose.random() < 0.5
        self.tables = nn.ModuleList(self._table(choose, size) for size in self.sizes)
        self.by_frequency = choose.random() < 0.02  # refused
        self.bottom = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), block(choose, "features", 2))
        fields = len(self.sizes) + 1
        self.top = nn.Linear(fields * fields if self.dots else fields * WIDTH, 1)

    def _table(self, choose: random.Random, size: int) -> nn.Module:
        sparse = choose.random() < 0.02
        if self.bag:
            return nn.EmbeddingBag(size, WIDTH, mode=choose.choice(["sum", "mean"]), sparse=sparse)
        return nn.Embedding(size, WIDTH, sparse=sparse, padding_idx=choose.choice([None, None, 0]))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        found = [self.bottom(dense)]
        for k, table in enumerate(self.tables):
            if self.bag:
                found.append(table(ids[:, k]))
            elif self.by_frequency and isinstance(table, nn.Embedding):
                found.append(F.embedding(ids[:, k, 0], table.weight, scale_grad_by_freq=True))
            else:
                found.append(table(ids[:, k, 0]))
        fields = torch.stack(found, 1)
        return self.top((fields @ fields.mT).flatten(1) if self.dots else fields.flatten(1)).squeeze(1)

    def batch(self, examples: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
        """Dense features and ids; and clicks."""
        dense = torch.randn(examples, 4, dtype=torch.float64, generator=generator)
        columns = [torch.randint(size, (examples, 2), generator=generator) for size in self.sizes]
        return (dense, torch.stack(columns, 1)), torch.randint(2, (examples,), generator=generator).double()


class Towers(nn.Module):
    """Users and items in one tensor of ids, or apart; with other items as negatives, or those of the batch."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self.users = nn.Embedding(50, WIDTH, sparse=choose.random() < 0.04)
        self.items = nn.Embedding(20, WIDTH)
        self.bias = nn.Parameter(torch.zeros(20)) if choose.random() < 0.5 else None
        self.tower = block(choose, "features", 2)
        self.in_batch, self.apart = choose.random() < 0.5, choose.random() < 0.5

    def forward(self, ids: Tensor, items: Tensor | None = None) -> Tensor:
        users, likes = (ids[:, 0], ids[:, 1:]) if items is None else (ids, items)
        user, item = self.tower(self.users(users)), self.items(likes)
        if self.in_batch:
            return user @ item[:, 0].t()
        scores = (user.unsqueeze(1) * item).sum(-1)
        return scores if self.bias is None else scores + self.bias[likes]

    def batch(self, examples: int, generator: torch.Generator) -> tuple[tuple[Tensor, ...], None]:
        """A user, an item that it likes and one that it does not."""
        users = torch.randint(50, (examples, 1), generator=generator)
        items = torch.randint(20, (examples, 2), generator=generator)
        return ((users[:, 0].clone(), items) if self.apart else (torch.cat([users, items], 1),)), None


def _in_batch(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, torch.arange(scores.size(0)))


def _ranked(scores: Tensor) -> Tensor:
    return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def tables(choose: random.Random) -> tuple[nn.Module, Any]:
    """A model of ids and its loss."""
    if choose.random() < 0.5:
        return Tables(choose), F.binary_cross_entropy_with_logits
    towers = Towers(choose)
    return towers, _in_batch if towers.in_batch else _ranked
