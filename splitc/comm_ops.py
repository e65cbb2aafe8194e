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


def all_reduce(*, role: str, parameters: tuple[str, ...]) -> None:
    """Identity; in backward the gradients of `parameters` are summed over the ranks of `role`."""


def total(value: torch.Tensor) -> torch.Tensor:
    """A scalar without gradient, summed over the ranks of the role: the denominator of a weighted mean."""
    return value


def total_weight(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """The weights of all targets of the role's ranks, summed; ignored ones weigh nothing."""
    return target.new_zeros((), dtype=torch.int64 if weight is None else weight.dtype)


def share(value: torch.Tensor) -> torch.Tensor:
    """`value` times this rank's share of the global batch, so that the ranks' values sum to the mean."""
    return value * 1.0


def dropout(value: torch.Tensor, p: float, *, layer: str, feature_dims: int = 0) -> torch.Tensor:
    """Dropout whose mask depends on seed, step, layer and examples, not on the rank.  No bytes on the wire."""
    return value * 1.0


@dataclass(frozen=True)
class CommOp:
    """What the compiler knows of one communication node.

    adjoint: the op of its backward, None when no gradient passes.
    sent: payload bytes that the busiest rank sends, from the value's bytes on that rank and the number of ranks.
    """

    function: Callable[..., Any]
    adjoint: Callable[..., Any] | None
    sent: Callable[[float, int], float]
    wire: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__


def _whole(nbytes: float, ranks: int) -> float:
    return nbytes


def _nothing(nbytes: float, ranks: int) -> float:
    return 0.0


def _ring(nbytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) / ranks * nbytes


OPS: dict[Callable[..., Any], CommOp] = {
    op.function: op
    for op in (
        CommOp(send, recv, _whole),
        CommOp(recv, send, _nothing),
        CommOp(all_reduce, all_reduce, _ring),
        CommOp(total, None, _ring),
        CommOp(total_weight, None, _ring),
        CommOp(share, share, _nothing, wire=False),
        CommOp(dropout, dropout, _nothing, wire=False),
    )
}
