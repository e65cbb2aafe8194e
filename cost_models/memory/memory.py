"""Bytes that one rank needs for a step of training.

    parameters and buffers   all that the rank holds
    gradients                as large as its trainable parameters
    optimizer state          `optimizer_copies` times those: 0 for SGD, 1 with momentum, 2 for Adam
    activations              what backward needs of the rank's examples
    communication            received cuts, gradients of cuts, flat copies of summed gradients

What a framework keeps besides (its context, its allocator's slack, a library's workspace) is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from splitc.ir.program import Program, StateTensor, TensorSpec
from splitc.ir.wire import wire


@dataclass(frozen=True)
class RankMemory:
    """The parts of a rank's memory, in bytes; each is the most that there is of it at any one time.

    activations: what autograd has saved.  communication: what travels and is not among them.
    most: what is alive at once, where the step itself was followed; None where only its parts are known.
    """

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    communication: float
    buffers: float = 0.0
    most: float | None = None

    @property
    def total(self) -> float:
        """All parts, as if there were the most of each at the same time."""
        held = self.parameters + self.buffers + self.gradients + self.optimizer_state
        return held + self.activations + self.communication

    @property
    def peak(self) -> float:
        """The most that is alive at once.

        Parts take turns.  When forward ends, all activations are there and no gradient yet, unless earlier batches are
        accumulated; as backward goes on, it frees the activations of a layer and makes its gradient, and the copy of it
        that travels; when it ends, only gradients are left.  Where the large parameters are in the last layers, as in
        AlexNet, all meet.  On the other hand values that no part counts live for a moment: results that are on their
        way to the next operation, gradients of activations, and all that a forward's variables hold until it returns.
        So the peak is found by following a step; without one it is taken to be the total.
        """
        return self.total if self.most is None else self.most


def gradient_nbytes(holdings: Iterable[StateTensor]) -> int:
    """Bytes of the gradients of the trainable ones."""
    return sum(holding.nbytes for holding in holdings if holding.trainable)


def rank_memory(
    holdings: Iterable[StateTensor],
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
        parameters=sum(holding.nbytes for holding in held if holding.parameter),
        gradients=gradients,
        optimizer_state=optimizer_copies * gradients,
        activations=kept,
        communication=communication,
        buffers=sum(holding.nbytes for holding in held if not holding.parameter),
    )


def cut_nbytes(spec: TensorSpec, batch: int) -> int:
    """What either side keeps of a cut: the value until the step ends, and its gradient when one goes back."""
    return spec.nbytes(batch) * (2 if spec.requires_grad else 1)


def exchanged_nbytes(program: Program, rank: int) -> float:
    """What a rank of a rewritten program keeps of all that it sends, receives and gathers, but buckets of gradients.

    Of a value that is gathered in turns, one turn's; both a value and its gradient count.
    """
    largest: dict[str, float] = {}
    for op in wire(program, rank):
        if ".bucket" in op.label:
            continue
        name = op.label.partition("[")[0] if op.kind == "collective" else op.label  # without its turn
        largest[name] = max(largest.get(name, 0.0), math.prod(op.shape) * op.dtype.itemsize)
    return sum(largest.values())
