"""Random blocks of models, which keep the shape of what they are given.

They mix layers, norms, attention, recurrence, residuals, branches, shared and frozen weights, buffers that count,
dropout and other random numbers, both precisions, and code that cannot be traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.random_python import python_block

CLASSES, WIDTH, LENGTH, SIDE, VOCABULARY = 5, 8, 3, 6, 11


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    """Two ways that meet again."""

    def __init__(self, left: nn.Module, right: nn.Module, by_product: bool) -> None:
        super().__init__()
        self.left, self.right, self.by_product = left, right, by_product

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), self.right(x)
        return a * torch.sigmoid(b) if self.by_product else a + b


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class Tied(nn.Module):
    """A linear layer with a twin of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Gain(nn.Module):
    """Parameters and a buffer of no layer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.offset


class Counting(nn.Module):
    """A buffer that counts the steps, and is read."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        return x * (1 + 0.1 * self.steps)


class DropPath(nn.Module):
    """Drops whole examples while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.size(0), *[1] * (x.dim() - 1), dtype=x.dtype) < 0.7
        return x * kept / 0.7


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


class Single(nn.Module):
    """A layer in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()).double()


class SignedSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.abs() * gradients[0]


class Opaque(nn.Module):
    """A layer that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return SignedSquare.apply(self.inner(x))  # type: ignore[no-untyped-call]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """Recurrent layers of any kind, in one direction or both, batch or sequence first."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        kind = choose.choice([nn.LSTM, nn.GRU, nn.RNN])
        both, depth, self.batch_first = choose.random() < 0.3, choose.choice([1, 1, 2, 3]), choose.random() < 0.7
        dropout = choose.choice([0.0, 0.4]) if depth > 1 else 0.0
        options: dict[str, Any] = {"bidirectional": both, "num_layers": depth, "dropout": dropout}
        if kind is nn.LSTM and not both and choose.random() < 0.15:
            options["proj_size"] = WIDTH // 2
        self.inner = kind(WIDTH, WIDTH // (2 if both else 1), batch_first=self.batch_first, **options)
        self.back = nn.Linear(WIDTH // 2, WIDTH) if "proj_size" in options else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)[0] if self.batch_first else self.inner(x.transpose(0, 1))[0].transpose(0, 1)
        return self.back(x)


class Along(nn.Module):
    """A convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


def block(choose: random.Random, kind: str, depth: int = 0) -> nn.Module:
    """A random block that keeps the shape: (b, WIDTH), (b, LENGTH, WIDTH) or (b, WIDTH, side, side)."""
    general: list[Callable[[], nn.Module]] = [
        Counting,
        DropPath,
        Noise,
        lambda: nn.Dropout(0.3),
        lambda: choose.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])(),
        lambda: Residual(block(choose, kind, depth + 1)),
        lambda: Branches(block(choose, kind, depth + 1), block(choose, kind, depth + 1), choose.random() < 0.5),
        lambda: block(choose, kind, depth + 1).requires_grad_(False),
        lambda: python_block(choose, block(choose, kind, 2)),
    ]
    flat: list[Callable[[], nn.Module]] = [
        *[lambda: nn.Linear(WIDTH, WIDTH)] * 3,
        lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)),
        lambda: nn.LayerNorm(WIDTH),
        lambda: Twice(nn.Linear(WIDTH, WIDTH)),
        *(Tied, Gain, Single, Opaque),
    ]
    of_kind: dict[str, list[Callable[[], nn.Module]]] = {
        "features": [*flat, lambda: nn.BatchNorm1d(WIDTH)],
        "tokens": [*flat, lambda: Attention(choose.choice([0.0, 0.2])), *[lambda: Recurrent(choose)] * 2, Along],
        "images": [
            *[lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1)] * 3,
            lambda: nn.GroupNorm(2, WIDTH),
            lambda: nn.BatchNorm2d(WIDTH),
            lambda: Twice(nn.Conv2d(WIDTH, WIDTH, 1)),
            lambda: nn.Dropout2d(0.3),
        ],
    }
    layers = of_kind[kind] * 2
    return choose.choice(layers if depth > 1 else layers + general)()
