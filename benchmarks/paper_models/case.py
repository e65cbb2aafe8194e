"""A model after its paper, with its batches and its loss, and the list of all of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.paper_models import zoo

Batch = tuple[tuple[Tensor, ...], Tensor | None]
Dims = int | tuple[int | None, ...] | Callable[[tuple[Tensor, ...], int, int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Paper:
    """A model of the table.

    source: authors, title, year.  make: builds the module.  batch: so many examples, inputs and target.
    loss: None where the module returns it.  dims: the batch dimension of inputs and target; of each where they differ,
    None for a tensor that every rank has whole; or a function that takes examples of a batch.  options: further
    arguments of `splitc.compile`.  package: the distribution needed.  kind: the file of `zoo/`, as words.
    """

    source: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Callable[..., Any] | None = None
    dims: Dims = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    examples: int = 4
    kind: str = ""


@dataclass
class PaperCase:
    """A paper's model as `tests.support.random_training` trains it."""

    paper: Paper
    model: Any
    tolerance: float = 1e-7
    seed: int = 1

    @property
    def batch_dim(self) -> Dims:
        return self.paper.dims

    def batch(self, examples: int, seed: int) -> Batch:
        """Inputs, and the target if there is one."""
        return self.paper.batch(examples, torch.Generator().manual_seed(seed))

    def value(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
        """The loss of a batch, as eager code computes it."""
        goal = () if target is None else (target,)
        found = self.model(*inputs, *goal) if self.paper.loss is None else self.paper.loss(self.model(*inputs), *goal)
        assert isinstance(found, Tensor)
        return found

    @property
    def normalises_the_batch(self) -> bool:
        return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in self.model.modules())

    @property
    def is_sparse(self) -> bool:
        """Whether some gradients are sparse tensors."""
        return any(getattr(each, "sparse", False) for each in self.model.modules())


def papers() -> dict[str, Paper]:
    """The models of all files of `zoo/`, by name."""
    found: dict[str, Paper] = {}
    for file in sorted(pkgutil.iter_modules(zoo.__path__), key=lambda file: file.name):
        models = importlib.import_module(f"{zoo.__name__}.{file.name}").MODELS
        found |= {name: replace(paper, kind=file.name.replace("_", " ")) for name, paper in models.items()}
    return found


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def ids(generator: torch.Generator, below: int, *shape: int) -> Tensor:
    """Whole numbers from 0."""
    return torch.randint(below, shape, generator=generator)
