"""A third-party model with random weights, its batch and its loss, and the list of all of them.

Files of `zoo/` import the package that they take models from inside the functions that build them, so that the list
can be read where a package is missing.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.real_models import zoo


@dataclass(frozen=True)
class Case:
    """A model in train mode, a batch as `splitc.compile` takes it, the targets, the loss."""

    module: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None

    def rows(self, rows: slice) -> tuple[Any, Any]:
        """Inputs and targets with these examples only."""
        return sliced(self.inputs, rows), sliced(self.target, rows)

    def to(self, dtype: torch.dtype) -> Case:
        """The case with every float tensor in `dtype`; the module is the same object."""
        loss = self.loss.to(dtype) if isinstance(self.loss, nn.Module) else self.loss
        return Case(self.module.to(dtype), cast(self.inputs, dtype), cast(self.target, dtype), loss)


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    package: its distribution's name.  make: builds it with so many examples.  shows: the obstacle it was chosen for.
    batched: whether dim 0 of its inputs is the batch at all.
    """

    package: str
    make: Callable[[int], Case]
    shows: str = ""
    batched: bool = True


def entries() -> dict[str, Entry]:
    """The models of all files of `zoo/`, by name."""
    found: dict[str, Entry] = {}
    for file in sorted(pkgutil.iter_modules(zoo.__path__), key=lambda file: file.name):
        for name, entry in importlib.import_module(f"{zoo.__name__}.{file.name}").MODELS.items():
            assert name not in found, f"two models are called {name}"
            found[name] = entry
    return found


def sliced(value: Any, rows: slice | Tensor) -> Any:
    """The rows of every tensor in a structure."""
    return pytree.tree_map(lambda leaf: leaf[rows].clone() if isinstance(leaf, Tensor) else leaf, value)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every real float tensor of a structure in `dtype`."""
    return pytree.tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point else leaf, value
    )
