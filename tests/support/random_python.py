"""Random blocks whose Python depends on values: branches and loops, which no trace can hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class OnBatch(nn.Module):
    """Branches on a number of the whole batch, which ranks that see a part of it would get wrong."""

    NUMBERS: tuple[Callable[[Tensor], float | bool], ...] = (
        lambda x: float(x.mean()) > 0.05,
        lambda x: x.detach().square().mean().item() > 0.6,
        lambda x: bool(x.amax() > 2),
        lambda x: int(x.sum()) % 2 == 0,
        lambda x: len(x[x.flatten(1).mean(1) > 0]) * 2 > len(x),
        lambda x: bool((x > 2.5).any()),
        lambda x: float(x.detach().norm()) > 6,
        lambda x: x.flatten(1).mean(1).argmax().item() == 0,
    )

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.number = inner, choose.randrange(len(self.NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x * 3 if self.NUMBERS[self.number](x) else x.tanh()

    def extra_repr(self) -> str:
        return f"number {self.number}"


class ByExample(nn.Module):
    """A loop over the examples, with a branch on each."""

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.stacks = inner, choose.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.inner(row.unsqueeze(0)) if float(row.sum()) > 0 else row.unsqueeze(0) * 0.5 for row in x]
        return torch.stack([row.squeeze(0) for row in rows]) if self.stacks else torch.cat(rows)


class OnParameter(nn.Module):
    """Branches on a parameter, which every rank that has it knows, and which training moves over the border."""

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.tensor(choose.choice([0.02, -0.02])))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 + self.gate) if self.gate.item() > 0 else x + self.inner(x) * self.gate


class OnCounter(nn.Module):
    """Branches on a buffer that counts the steps."""

    steps: Tensor

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.until = inner, choose.choice([1, 2, 3])
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return self.inner(x) if int(self.steps) < self.until else x + 0.5 * self.inner(x)


class OnAttribute(nn.Module):
    """Branches on a plain number that counts the calls while it trains."""

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.until, self.calls = inner, choose.choice([1, 2, 3]), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.inner(x) if self.calls <= self.until else x + 0.5 * self.inner(x)


class OwnNumbers(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, choose: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kind = inner, choose.choice(["numpy", "python", "torch"])
        self.numpy, self.python = np.random.RandomState(3), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if not self.training:
            return x
        match self.kind:
            case "numpy":
                factor = float(self.numpy.rand())
            case "python":
                factor = self.python.random()
            case _:
                factor = float(torch.rand((), generator=torch.Generator().manual_seed(3)))
        return x * (0.5 + factor)


def python_block(choose: random.Random, inner: nn.Module) -> nn.Module:
    """A block around `inner` whose Python depends on values."""
    kinds = [OnBatch, OnParameter, OnCounter, OnAttribute, OwnNumbers, ByExample]
    normalises = any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d) for each in inner.modules())
    return choose.choices(kinds, [6, 2, 2, 0.2, 0.6, 0 if normalises else 3])[0](choose, inner)
