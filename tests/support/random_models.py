"""Random models and random losses: the same seed gives the same model, loss and data.

A model begins with features, tokens or images, passes some random blocks, and ends with scores of classes.  Blocks mix
layers, norms, attention, recurrence, residuals, branches, shared and frozen weights, buffers that count, dropout and
other random numbers, both precisions, and code that cannot be traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH, LENGTH, SIDE, VOCABULARY = 5, 8, 3, 6, 11


# -- blocks ------------------------------------------------------------------------------------------------------------


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
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, batch_first=True)  # type: ignore[call-arg,arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


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
        "tokens": [
            *flat,
            lambda: Attention(choose.choice([0.0, 0.2])),
            lambda: Recurrent(choose.choice([nn.LSTM, nn.GRU, nn.RNN])),
            Along,
        ],
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


class Random(nn.Module):
    """A model of random blocks.

    Its forward may take a second input, compute the loss, return several scores, or scores of each token.
    """

    def __init__(self, choose: random.Random, loss: Callable[[Any, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.kind = choose.choice(["features", "tokens", "images"])
        self.loss = loss
        starts: dict[str, Callable[[], nn.Module]] = {
            "features": lambda: nn.Linear(4, WIDTH),
            "tokens": lambda: nn.Embedding(VOCABULARY, WIDTH),
            "images": lambda: nn.Conv2d(1, WIDTH, 3, padding=1),
        }
        self.start = starts[self.kind]()
        self.second = nn.Linear(4, WIDTH) if choose.random() < 0.3 else None
        self.blocks = nn.ModuleList(block(choose, self.kind) for _ in range(choose.randint(1, 5)))
        self.by_token = self.kind == "tokens" and choose.random() < 0.4
        rest = "tokens" if self.by_token else "features"
        self.tail = nn.ModuleList(block(choose, rest) for _ in range(choose.randint(0, 3)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.aux = nn.Linear(WIDTH, CLASSES) if choose.random() < 0.25 else None
        self.flip = choose.random() < 0.5

    def forward(self, x: Tensor, extra: Tensor | None = None, target: Tensor | None = None) -> Any:
        x = self.start(x)
        for each in self.blocks:
            x = each(x)
        if self.kind == "tokens" and not self.by_token:
            x = x.mean(1) if self.flip else x[:, -1]
        if self.kind == "images":
            x = F.max_pool2d(x, 2).mean((2, 3)) if self.flip else F.adaptive_avg_pool2d(x, 1).flatten(1)
        early = x
        if self.second is not None and extra is not None:
            more = torch.tanh(self.second(extra))
            x = x + (more.unsqueeze(1) if self.by_token else more)
        for each in self.tail:
            x = each(x)
        scores = self.head(x)
        if self.aux is not None and self.training:
            scores = scores, self.aux(early)
        return scores if self.loss is None or target is None else self.loss(scores, target)


# -- losses ------------------------------------------------------------------------------------------------------------


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


LOSSES = (F.cross_entropy, _ignoring, _masked, _weighted, _sum, _squares, _several, _smoothed)


@dataclass
class Loss:
    """A loss of all scores; `model`: whose weights are penalised too, as a user's closure does."""

    of: Callable[[Tensor, Tensor], Tensor]
    model: list[nn.Module] = field(default_factory=list)

    def __call__(self, scores: Any, target: Tensor) -> Tensor:
        first, *others = scores if isinstance(scores, tuple) else (scores,)
        total = self.of(first.flatten(0, -2), target.flatten())
        for each in others:
            total = total + 0.4 * F.cross_entropy(each.flatten(0, -2), target.flatten())
        for model in self.model:
            total = total + 1e-3 * model.get_parameter("head.weight").pow(2).sum()
        return total


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass
class RandomCase:
    """A model with its loss; `loss` is None where forward computes it."""

    seed: int
    model: Random
    loss: Loss | None
    tolerance: float

    def batch(self, examples: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs, and the target."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        shapes = {"features": (4,), "images": (1, SIDE, SIDE)}
        if self.model.kind == "tokens":
            inputs = [torch.randint(VOCABULARY, (examples, LENGTH), generator=generator)]
        else:
            inputs = [torch.randn(examples, *shapes[self.model.kind], dtype=torch.float64, generator=generator)]
        if self.model.second is not None or self.loss is None:
            inputs.append(torch.randn(examples, 4, dtype=torch.float64, generator=generator))
        shape = (examples, LENGTH) if self.model.by_token else (examples,)
        return tuple(inputs), torch.randint(CLASSES, shape, generator=generator)

    def value(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """The loss of a batch, as eager code computes it."""
        if self.loss is None:
            return self.model(*inputs, target)
        return self.loss(self.model(*inputs), target)

    @property
    def normalises_the_batch(self) -> bool:
        return any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d) for each in self.model.modules())


def random_case(seed: int) -> RandomCase:
    """The model and loss of a seed, in float64 but for what is in single precision by design."""
    choose = random.Random(seed)
    loss = Loss(choose.choice(LOSSES))
    inside = choose.random() < 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Random(choose, loss if inside else None).double()
    is_mixed = False
    for each in model.modules():
        if isinstance(each, Single):
            each.float()
            is_mixed = True
    if not inside and choose.random() < 0.2:
        loss.model.append(model)
    return RandomCase(seed, model, None if inside else loss, 1e-4 if is_mixed else 1e-8)
