"""A model and its data, for builds of several worlds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from splitc.compiled import CompiledProgram
from tests.support.compiled import compiled


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x).relu(), 0.3, self.training))


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """30 examples, of which 12 make a batch; the first number of each is its own."""

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        x[0] = k / 30
        return x, torch.tensor(k % 3)

    def __len__(self) -> int:
        return 30


@cache
def program(strategy: str = "layer_separation", **options: Any) -> CompiledProgram:
    x, y = zip(*(Numbered()[k] for k in range(4)), strict=True)
    return compiled(Dropping(), (torch.stack(x),), torch.stack(y), F.cross_entropy, 4, strategy, **options)
