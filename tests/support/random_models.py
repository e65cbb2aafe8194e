"""Random models and random losses: the same seed gives the same model, loss and data."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.random_blocks import CLASSES, LENGTH, SIDE, VOCABULARY, WIDTH, Single, block
from tests.support.random_losses import LABELLED, LOSSES, PAIRS, REFUSED, UNLABELLED, Loss
from tests.support.random_sequences import sequence_first
from tests.support.random_tables import tables
from tests.support.random_views import views

__all__ = ["CLASSES", "LOSSES", "VOCABULARY", "Loss", "RandomCase", "random_case"]

Batch = tuple[tuple[Tensor, ...], Tensor | None]


class Model(Protocol):
    """What a random model says of itself; it is a module."""

    def batch(self, examples: int, generator: torch.Generator) -> Batch: ...


class Random(nn.Module):
    """A model of random blocks.

    Its forward may take a second input, compute the loss, return several scores, or scores of each token.
    """

    def __init__(self, choose: random.Random, loss: Callable[[Any, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.kind = choose.choice(["features", "tokens", "images"])
        self.criterion = loss
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
        self.flip, self.by_name, self.with_target = choose.random() < 0.5, choose.random() < 0.4, True

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
            other = self.aux(early)
            scores = {"scores": scores, "aux": other} if self.by_name else (scores, other)
        return scores if self.criterion is None or target is None else self.criterion(scores, target)

    def batch(self, examples: int, generator: torch.Generator) -> Batch:
        """Inputs, and the target."""
        shapes = {"features": (4,), "images": (1, SIDE, SIDE)}
        if self.kind == "tokens":
            inputs = [torch.randint(VOCABULARY, (examples, LENGTH), generator=generator)]
        else:
            inputs = [torch.randn(examples, *shapes[self.kind], dtype=torch.float64, generator=generator)]
        if self.second is not None or self.criterion is not None:
            inputs.append(torch.randn(examples, 4, dtype=torch.float64, generator=generator))
        shape = (examples, LENGTH) if self.by_token else (examples,)
        target = torch.randint(CLASSES, shape, generator=generator)
        return tuple(inputs), target if self.with_target else None


@dataclass
class RandomCase:
    """A model with its loss; `loss` is None where forward computes it.  batch_dim: of all inputs and the target."""

    seed: int
    model: Any
    loss: Callable[..., Tensor] | None
    tolerance: float
    batch_dim: int = 0

    def batch(self, examples: int, seed: int) -> Batch:
        """Inputs, and the target if there is one."""
        return self.model.batch(examples, torch.Generator().manual_seed(1000 * self.seed + seed))

    def value(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        """The loss of a batch, as eager code computes it."""
        goal = () if target is None else (target,)
        if self.loss is None:
            return self.model(*inputs, *goal)
        return self.loss(self.model(*inputs), *goal)

    @property
    def loss_name(self) -> str:
        """The function that it is made of, and of several outputs the one of each pair."""
        loss = self.loss if self.loss is not None else self.model.criterion
        parts = [getattr(loss, "of", loss), getattr(loss, "pair", None) if getattr(self.model, "aux", None) else None]
        return " and ".join(each.__name__.strip("_") for each in parts if each is not None)

    @property
    def normalises_the_batch(self) -> bool:
        return any(isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d) for each in self.model.modules())

    @property
    def is_sparse(self) -> bool:
        """Whether some gradients are sparse tensors."""
        return any(getattr(each, "sparse", False) for each in self.model.modules())


def random_case(seed: int) -> RandomCase:
    """The model and loss of a seed, in float64 but for what is in single precision by design."""
    choose = random.Random(seed)
    make = choose.choices([_chain, views, tables, sequence_first], [10, 4, 3, 3])[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss = make(choose)
    model = model.double()
    singles = [each.float() for each in model.modules() if isinstance(each, Single)]
    batch_dim = 1 if make is sequence_first else 0
    return RandomCase(seed, model, loss, 1e-4 if singles else 1e-8, batch_dim)


def _chain(choose: random.Random) -> tuple[nn.Module, Loss | None]:
    losses = [*LOSSES, *LABELLED, *UNLABELLED]
    of = choose.choices(losses, [0.1 if each in REFUSED else 1 for each in losses])[0]
    loss = Loss(of, pair=choose.choice(PAIRS))
    inside = choose.random() < 0.2
    model = Random(choose, loss if inside else None)
    model.with_target = of not in UNLABELLED or inside
    if not inside and choose.random() < 0.2:
        loss.model.append(model)
    return model, None if inside else loss
