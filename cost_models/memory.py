"""Bytes that one rank needs for a step of training.

    parameters and buffers   all that the rank holds
    gradients                as large as its trainable parameters
    optimizer state          `optimizer_copies` times those: 0 for SGD, 1 with momentum, 2 for Adam
    activations              what backward needs of the rank's examples
    communication            received cuts, gradients of cuts, flat copies of summed gradients

What a framework keeps besides (its context, its allocator's slack) is not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.program import Holding, TensorSpec


@dataclass(frozen=True)
class RankMemory:
    """The parts of a rank's memory, in bytes."""

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    communication: float

    @property
    def total(self) -> float:
        held = self.parameters + self.gradients + self.optimizer_state
        return held + self.activations + self.communication


def gradient_nbytes(holdings: Iterable[Holding]) -> int:
    """Bytes of the gradients of the trainable ones."""
    return sum(holding.nbytes for holding in holdings if holding.trainable)


def rank_memory(
    holdings: Iterable[Holding],
    kept: float,
    communication: float = 0.0,
    optimizer_copies: int = 1,
) -> RankMemory:
    """Memory of a rank with `holdings` that keeps `kept` bytes of activations.

    A tied holding is given once.  `communication` is in bytes.
    """
    held = tuple(holdings)
    gradients = gradient_nbytes(held)
    return RankMemory(
        parameters=sum(holding.nbytes for holding in held),
        gradients=gradients,
        optimizer_state=optimizer_copies * gradients,
        activations=kept,
        communication=communication,
    )


def received_nbytes(spec: TensorSpec, batch: int) -> int:
    """What the reader of a cut keeps for it: the value, and its gradient when one goes back."""
    return spec.nbytes(batch) * (2 if spec.requires_grad else 1)


def returned_nbytes(spec: TensorSpec, batch: int) -> int:
    """What the maker of a cut keeps for it: the gradient that comes back.

    The value itself is one of its activations.
    """
    return spec.nbytes(batch) if spec.requires_grad else 0
