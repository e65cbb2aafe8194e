"""Sum the bytes that one rank needs for a training step.

    parameters and buffers   all that the rank holds
    gradients                as large as its trainable parameters
    optimizer state          `optimizer_copies` times those: 0 for SGD, 1 with momentum, 2 for Adam
    activations              saved for backward, of the rank's examples
    communication            received cuts, gradients of cuts, flat copies of all-reduced gradients

Framework overhead (CUDA context, allocator fragmentation, library workspaces) is not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.ir.layers import StateTensor
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.ir.wire_op import Payload, What


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory by kind, in bytes; each kind at its own peak.

    activations: saved by autograd.  communication: message buffers that autograd does not save.
    peak: of all kinds together, as a step on fake tensors shows it.

    The kinds peak at different times.  At the end of forward all activations are live and no gradients, unless earlier
    batches are accumulated; backward frees a layer's activations and allocates its gradient, and the copy that is
    communicated; at its end only gradients are left.  Where the last layers hold most parameters, as in AlexNet, the
    peaks coincide.  On the other hand no kind counts temporaries: results on their way to the next operation, gradients
    of activations, and local variables of a forward until it returns.
    """

    parameters: float
    gradients: float
    optimizer_state: float
    activations: float
    communication: float
    buffers: float
    peak: float


def gradient_nbytes(tensors: Iterable[StateTensor]) -> int:
    """Bytes of the gradients of the trainable tensors."""
    return sum(tensor.nbytes for tensor in tensors if tensor.trainable)


def needed_nbytes(
    tensors: Iterable[StateTensor], saved: float, communication: float = 0.0, optimizer_copies: int = 1
) -> float:
    """Bytes that a rank needs which holds `tensors`, each tied tensor once, as if all kinds peaked at the same time.

    saved, communication: bytes of activations saved for backward, and of message buffers.
    """
    held = tuple(tensors)
    whole = sum(tensor.nbytes for tensor in held) + (1 + optimizer_copies) * gradient_nbytes(held)
    return whole + saved + communication


def exchanged_nbytes(program: LoweredProgram, rank: int) -> float:
    """Bytes that a rank of a lowered program buffers for messages and gathers, gradient buckets excluded.

    A value and its gradient both count; of a value gathered by microbatches, its largest microbatch.
    """
    largest: dict[Payload, float] = {}
    for op in wire(program, rank):
        if op.payload.what is not What.BUCKET:
            value = op.payload.of_any_turn
            nbytes = (op.computed + op.nbytes * bool(op.form)) / (len(op.ranks) if op.algorithm == "all_to_all" else 1)
            largest[value] = max(largest.get(value, 0.0), nbytes)
    return sum(largest.values())
