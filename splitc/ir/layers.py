"""Parameters and buffers, layers, and the terms of the loss of a captured model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class StateTensor:
    """A parameter or a buffer of the model, under its own name.

    `names` are all the names under which the model's state_dict has it; more than one when it is tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool = False
    persistent: bool = True
    names: tuple[str, ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its own name, and then the others."""
        return tuple(dict.fromkeys((self.name, *self.names)))

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def trainable(self) -> bool:
        """Whether training changes it: not where the loss does not reach it, nor a parameter without elements."""
        return self.parameter and self.requires_grad and self.numel > 0


@dataclass(frozen=True)
class Layer:
    """A node that owns parameters, with the parameterless nodes that follow it.

    nodes: their names, in the order of the graph.  tensors: names of the parameters and buffers that they use.
    """

    name: str
    nodes: tuple[str, ...]
    tensors: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class LossTerm:
    """How one scalar of the loss adds up over parts of the batch.

    kind    "mean": equal weights, a part counts by its share of the examples
            "weighted": `reduction="mean"` over weights (`ignore_index`, class weights); the denominator is summed
            "sum": parts simply add
    node    the scalar's node
    """

    node: str
    kind: str


@dataclass(frozen=True)
class Coupling:
    """A node at which examples of a batch begin to depend on each other.

    node    its name
    why     what couples them, with the user's lines
    """

    node: str
    why: str
