"""The communication operations, each defined once: printer, prices, memory, checks and codegen read `OPS`.

A communication node calls one of the functions below.  On (fake) tensors each computes what a single rank would see, so
a graph with communication runs for its shapes; at run time the method of `splitc.runtime.RoleComm` of the same name
communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.runtime.seeded.draws import Layout
from splitc.runtime.seeded.mode import running


def send(value: torch.Tensor, *, cut: str, role: str) -> torch.Tensor:
    """Send each rank of `role` the examples that it computes on: from one or several ranks, to one or several."""
    return value


def recv(
    value: torch.Tensor | None, *, cut: str, role: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Receive the examples that this rank computes on from the ranks of `role`.  shape: -1 stands for the batch."""
    assert value is not None, "a split graph gets its received values from outside"
    return value


def modulo(value: torch.Tensor, *, cut: str) -> torch.Tensor:
    """Gather a microbatch of every rank of the group (SplitBrain 3, L_M); backward reduce-scatters its gradient."""
    return value


def slice_batch(value: torch.Tensor, *, cut: str) -> torch.Tensor:
    """Slice this rank's examples out of those of its group; backward gathers the gradients of the group."""
    return value


def shard(value: torch.Tensor, *, features: int, partial: bool = True) -> torch.Tensor:
    """Gather the ranks' slices of the last dim over the group (SplitBrain 3, L_S).

    features: size of the gathered dim.  partial: the consumer is sharded, so the ranks' gradients are terms of a sum
    and backward is a reduce-scatter; else all ranks have the same gradient and slice it.
    """
    return value


def slice_features(value: torch.Tensor, *, features: int) -> torch.Tensor:
    """Slice this rank's features out of the last dim, which all ranks of the group have; no gradient passes."""
    return value


def copy_to_group(value: torch.Tensor) -> torch.Tensor:
    """Return `value`; backward all-reduces the gradients of its sharded readers over the group."""
    return value


def reduce_from_group(value: torch.Tensor) -> torch.Tensor:
    """All-reduce the ranks' partial products over the group; backward is the identity."""
    return value


def late_multiply(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer.  Backward all-gathers its input X and output error E; every rank computes dW = E^T X."""
    return torch.nn.functional.linear(value, weight, bias)


def batch_norm(value: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Apply the BatchNorm `module` with statistics over all ranks of the role."""
    normalised: torch.Tensor = module(value)
    return normalised


def pull(*, role: str, bucket: int) -> None:
    """Wait for the parameters of a bucket from the servers."""


def push(*, role: str, parameters: tuple[str, ...]) -> None:
    """Mark `parameters` whose gradients are sent to servers, which sum them over the workers."""


def all_reduce(*, role: str, parameters: tuple[str, ...]) -> None:
    """Mark `parameters` whose gradients are all-reduced over their replicas in `role`."""


def all_reduce_scalar(value: torch.Tensor) -> torch.Tensor:
    """All-reduce a scalar without gradient over the role: the denominator of a weighted mean."""
    return value


def global_weight(target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100) -> torch.Tensor:
    """Sum the class weights of all targets of the role's ranks; ignored targets count zero."""
    return target.new_zeros((), dtype=torch.int64 if weight is None else weight.dtype)


def scale_by_share(value: torch.Tensor) -> torch.Tensor:
    """Multiply a mean by this rank's share of the global batch, so that the ranks' values sum to the global mean."""
    return value * 1.0


def dropout(
    value: torch.Tensor,
    p: float,
    *,
    draw: int,
    feature_dims: int = 0,
    dim: int | None = 0,
    rows: int = 1,
    outer: int = 1,
    features: int | None = None,
    evaluating: bool = False,
) -> torch.Tensor:
    """Apply dropout with a mask that depends on seed, step, draw, example and position, not on the rank.

    draw: the ordinal of the random call in forward and loss.  feature_dims: leading dims of the mask; 0: all.
    dim, rows, outer: where its examples lie (see `Layout`).
    features: size of the whole last dim, of which the rank has a slice; None: it has all.
    evaluating: also in evaluation mode.
    """
    mode = running()
    return F.dropout(value, p) if mode is None else mode.mask(value, p, feature_dims, (draw,), Layout(dim, rows, outer))


def uniform(like: torch.Tensor, *, draw: int, dim: int | None = 0, rows: int = 1, outer: int = 1) -> torch.Tensor:
    """Numbers in [0, 1) in the shape and dtype of `like`, seeded as the masks of `dropout` are."""
    mode, like = running(), like.detach()
    return torch.rand_like(like) if mode is None else mode.numbers("uniform", like, (draw,), Layout(dim, rows, outer))


def normal(like: torch.Tensor, *, draw: int, dim: int | None = 0, rows: int = 1, outer: int = 1) -> torch.Tensor:
    """Numbers of the standard normal distribution in the shape and dtype of `like`, seeded likewise."""
    mode, like = running(), like.detach()
    return torch.randn_like(like) if mode is None else mode.numbers("normal", like, (draw,), Layout(dim, rows, outer))


DRAWS = (dropout, uniform, normal)
"""The operations that draw random numbers."""


def store_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Let a buffer of the model have `value` from the next training step on; all ranks that hold it compute it."""


class Collective(StrEnum):
    """What an operation does on the wire."""

    SEND = "send"
    RECV = "recv"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    NONE = "none"  # the rank computes it alone

    def sent(self, nbytes: float, own: float, ranks: int) -> float:
        """Return the payload bytes that a rank sends.

        nbytes: of the whole value.  own: of this rank's part of it, which is the whole value for a sum or a message.
        """
        match self:
            case Collective.SEND:
                return own
            case Collective.ALL_GATHER:
                return (ranks - 1) * own
            case Collective.REDUCE_SCATTER:
                return nbytes - own
            case Collective.ALL_REDUCE:  # on a ring
                return 2 * (ranks - 1) / ranks * nbytes
            case _:
                return 0.0


class Over(Enum):
    """The ranks that an operation joins."""

    ROUTES = "the ranks of the peer role that have examples in common with this rank"
    GROUP = "the model-parallel group"
    REPLICAS = "the ranks of the role that hold the same parameters"
    SERVERS = "the parameter servers, or their workers"
    WORLD = "all ranks"


class Dim(Enum):
    """The dimension along which the ranks' parts of a value lie."""

    EXAMPLES = "examples"
    FEATURES = "features"


@dataclass(frozen=True)
class CommOp:
    """One operation: a communication node, the adjoint of one, or an action of the step.

    dim: None where every rank has a whole value, or a term of its sum.
    adjoint: the operation that takes its gradient; None where none passes.
    in_stage: called within a stage's forward; the others are actions of the step.
    """

    name: str
    collective: Collective
    over: Over | None = None
    dim: Dim | None = None
    adjoint: str | None = None
    in_stage: bool = False

    def backward(self, partial: bool = True) -> Collective:
        """Return what the gradient does on the wire.

        partial: the ranks' gradients are terms of a sum; else all ranks have the same one, and slice their part of it.
        """
        collective = Collective.NONE if self.adjoint is None else OPS[self.adjoint].collective
        return collective if partial or collective is not Collective.REDUCE_SCATTER else Collective.NONE


OPS = {
    op.name: op
    for op in (
        CommOp("send", Collective.SEND, Over.ROUTES, Dim.EXAMPLES, "recv_grad"),
        CommOp("recv_grad", Collective.RECV, Over.ROUTES, Dim.EXAMPLES, "send"),
        CommOp("recv", Collective.RECV, Over.ROUTES, Dim.EXAMPLES, "send_grad"),
        CommOp("send_grad", Collective.SEND, Over.ROUTES, Dim.EXAMPLES, "recv"),
        CommOp("modulo", Collective.ALL_GATHER, Over.GROUP, Dim.EXAMPLES, "modulo_grad"),
        CommOp("modulo_grad", Collective.REDUCE_SCATTER, Over.GROUP, Dim.EXAMPLES, "modulo"),
        CommOp("slice_batch", Collective.NONE, Over.GROUP, Dim.EXAMPLES, "all_gather_grad"),
        CommOp("all_gather_grad", Collective.ALL_GATHER, Over.GROUP, Dim.EXAMPLES, "slice_batch"),
        CommOp("shard", Collective.ALL_GATHER, Over.GROUP, Dim.FEATURES, "shard_grad", in_stage=True),
        CommOp("shard_grad", Collective.REDUCE_SCATTER, Over.GROUP, Dim.FEATURES, "shard", in_stage=True),
        CommOp("slice_features", Collective.NONE, Over.GROUP, Dim.FEATURES, in_stage=True),
        CommOp("copy_to_group", Collective.NONE, Over.GROUP, None, "reduce_from_group", in_stage=True),
        CommOp("reduce_from_group", Collective.ALL_REDUCE, Over.GROUP, None, "copy_to_group", in_stage=True),
        CommOp("late_multiply", Collective.NONE, Over.REPLICAS, Dim.EXAMPLES, "gather_errors", in_stage=True),
        CommOp("gather_errors", Collective.ALL_GATHER, Over.REPLICAS, Dim.EXAMPLES, "late_multiply", in_stage=True),
        CommOp("batch_norm", Collective.ALL_REDUCE, Over.REPLICAS, None, "batch_norm", in_stage=True),
        CommOp("all_reduce_scalar", Collective.ALL_REDUCE, Over.REPLICAS, None, in_stage=True),
        CommOp("global_weight", Collective.ALL_REDUCE, Over.REPLICAS, None, in_stage=True),
        CommOp("scale_by_share", Collective.NONE, None, None, "scale_by_share", in_stage=True),
        CommOp("dropout", Collective.NONE, None, None, "dropout", in_stage=True),
        CommOp("uniform", Collective.NONE, in_stage=True),
        CommOp("normal", Collective.NONE, in_stage=True),
        CommOp("store_buffer", Collective.NONE, in_stage=True),
        CommOp("pull", Collective.RECV, Over.SERVERS, None, "push", in_stage=True),
        CommOp("push", Collective.SEND, Over.SERVERS, None, "pull"),
        CommOp("send_parameters", Collective.SEND, Over.SERVERS, None, "reduce_gradients"),
        CommOp("reduce_gradients", Collective.RECV, Over.SERVERS, None, "send_parameters"),
        CommOp("all_reduce", Collective.ALL_REDUCE, Over.REPLICAS, None, "all_reduce"),
        CommOp("all_reduce_tied", Collective.ALL_REDUCE, None, None, "all_reduce_tied"),
        CommOp("sum_loss", Collective.ALL_REDUCE, Over.WORLD, None),
    )
}
"""Every operation, by the name of its node or action."""

NODES: dict[Callable[..., Any], CommOp] = {
    function: OPS[function.__name__]
    for function in (
        send,
        recv,
        modulo,
        slice_batch,
        shard,
        slice_features,
        copy_to_group,
        reduce_from_group,
        late_multiply,
        batch_norm,
        pull,
        push,
        all_reduce,
        all_reduce_scalar,
        global_weight,
        scale_by_share,
        *DRAWS,
        store_buffer,
    )
}
"""The operations that are nodes of a graph, by their function."""

ENTRIES = (recv, modulo)
"""The nodes that bring a value into a stage."""


def op_of(node: fx.Node) -> CommOp | None:
    """Return the operation that `node` is, None for other nodes."""
    return NODES.get(node.target) if callable(node.target) else None
