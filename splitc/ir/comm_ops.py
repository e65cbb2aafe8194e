"""The communication nodes: one definition each, read by the printer, the prices, the checker and codegen.

Every op is a function that can stand as the target of a graph node.  Called on (fake) tensors it is what one rank alone
would see, so a graph with communication still runs for its shapes; on the wire it is what `splitc.runtime.Rank`'s
method of the same name does.  `OPS[function]` tells its adjoint and its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def send(value: torch.Tensor, *, cut: str, role: str) -> torch.Tensor:
    """Give each rank of `role` the examples it works on.  One to one, many to one, one to many, or both."""
    return value


def recv(
    value: torch.Tensor | None, *, cut: str, role: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The examples this rank works on, from the ranks of `role` that have them.  shape: -1 is the batch."""
    assert value is not None, "a split graph gets its received values from outside"
    return value


def modulo(value: torch.Tensor, *, cut: str) -> torch.Tensor:
    """A turn's examples of every rank of the group, gathered (SplitBrain 3, L_M); backward gives them back, summed."""
    return value


def slice_batch(value: torch.Tensor, *, cut: str) -> torch.Tensor:
    """Each rank's own examples out of those of its group; backward gathers the gradients of the group."""
    return value


def shard(value: torch.Tensor, *, features: int, partial: bool = True) -> torch.Tensor:
    """Each rank's part of the last dim, gathered over the group (SplitBrain 3, L_S).

    features: of the whole.  partial: the consumer is sharded, so that the ranks' gradients are parts of a sum, which
    backward takes by a reduce-scatter; else all ranks have the same gradient and take their own part of it.
    """
    return value


def copy_to_group(value: torch.Tensor) -> torch.Tensor:
    """Identity; in backward the sharded readers' gradients are summed over the group."""
    return value


def reduce_from_group(value: torch.Tensor) -> torch.Tensor:
    """The sum over the group of what the ranks made of their part of the features; backward is the identity."""
    return value


def late_multiply(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer.  Backward all-gathers its input X and output error E, and every rank computes W' = E^T X."""
    return torch.nn.functional.linear(value, weight, bias)


def batch_norm(value: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """BatchNorm `module` over the examples of all ranks of the role."""
    normalised: torch.Tensor = module(value)
    return normalised


def pull(*, role: str, bucket: int) -> None:
    """Wait for the parameters of a bucket, which servers send."""


def push(*, role: str, parameters: tuple[str, ...]) -> None:
    """Identity; in backward the gradients of `parameters` go to their servers, which sum them over the workers."""


def all_reduce(*, role: str, parameters: tuple[str, ...]) -> None:
    """Identity; in backward the gradients of `parameters` are summed over their replicas in `role`."""


def all_reduce_scalar(value: torch.Tensor) -> torch.Tensor:
    """A scalar without gradient, summed over the ranks of the role: the denominator of a weighted mean."""
    return value


def global_weight(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """The weights of all targets of the role's ranks, summed; ignored ones weigh nothing."""
    return target.new_zeros((), dtype=torch.int64 if weight is None else weight.dtype)


def scale_by_share(value: torch.Tensor) -> torch.Tensor:
    """`value` times this rank's share of the global batch, so that the ranks' values sum to the mean."""
    return value * 1.0


def dropout(value: torch.Tensor, p: float, *, layer: str, feature_dims: int = 0, sharded: bool = False) -> torch.Tensor:
    """Dropout whose mask depends on seed, step, layer and examples, not on the rank.  No bytes on the wire.

    sharded: the rank has a part of the features, whose mask depends on which part.
    """
    return value * 1.0


@dataclass(frozen=True)
class CommOp:
    """What the compiler knows of one communication node.

    adjoint: the op of its backward, None when no gradient passes.
    sent: payload bytes that a rank sends in forward, and in backward, from the value's bytes on that rank (before the
    op) and the number of ranks.
    inside: whether it is called within a stage's forward, not as an action of the step.
    """

    function: Callable[..., Any]
    adjoint: Callable[..., Any] | None
    sent: Callable[[float, int], float]
    returned: Callable[[float, int], float]
    inside: bool = True
    wire: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__


def _whole(nbytes: float, ranks: int) -> float:
    return nbytes


def _nothing(nbytes: float, ranks: int) -> float:
    return 0.0


def _to_others(nbytes: float, ranks: int) -> float:
    """An all-gather of `nbytes` on each rank."""
    return (ranks - 1) * nbytes


def _parts(nbytes: float, ranks: int) -> float:
    """A reduce-scatter of `nbytes` on each rank."""
    return (ranks - 1) / ranks * nbytes


def _ring(nbytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * nbytes


OPS: dict[Callable[..., Any], CommOp] = {
    op.function: op
    for op in (
        CommOp(send, recv, _whole, _nothing, inside=False),
        CommOp(recv, send, _nothing, _whole, inside=False),
        CommOp(modulo, modulo, _to_others, _parts, inside=False),
        CommOp(slice_batch, slice_batch, _nothing, _to_others, inside=False),
        CommOp(shard, shard, _to_others, _parts),
        CommOp(copy_to_group, reduce_from_group, _nothing, _ring),
        CommOp(reduce_from_group, copy_to_group, _ring, _nothing),
        CommOp(late_multiply, late_multiply, _nothing, _to_others),
        CommOp(batch_norm, batch_norm, _ring, _ring),
        CommOp(pull, push, _whole, _nothing),
        CommOp(push, pull, _nothing, _whole, inside=False),
        CommOp(all_reduce, all_reduce, _nothing, _ring, inside=False),
        CommOp(all_reduce_scalar, None, _ring, _nothing),
        CommOp(global_weight, None, _ring, _nothing),
        CommOp(scale_by_share, scale_by_share, _nothing, _nothing, wire=False),
        CommOp(dropout, dropout, _nothing, _nothing, wire=False),
    )
}
"""Every communication node."""

ENTRIES = (recv, modulo)
"""What brings a value into a stage."""
