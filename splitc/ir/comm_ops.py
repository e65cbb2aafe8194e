"""The communication operations, each defined once: printer, prices, memory, checks and codegen read `OPS`.

A communication node calls one of the functions below.  On (fake) tensors each computes what a single rank would see, so
a graph with communication runs for its shapes; at run time the method of `splitc.runtime.RoleComm` of the same name
communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir.program import Spec, TensorSpec
from splitc.ir.transitions import TRANSITIONS, Collective, forward_collective
from splitc.runtime.seeded.draws import Layout
from splitc.runtime.seeded.mode import running


def send(value: torch.Tensor, *, cut: str, role: str, to: str = "batch") -> torch.Tensor:
    """Send each rank of `role` the examples that it computes on; to: the state in which its groups receive them."""
    return value


def recv(
    value: torch.Tensor | None, *, cut: str, role: str, shape: tuple[int, ...], dtype: torch.dtype, to: str = "batch"
) -> torch.Tensor:
    """Receive the examples that this rank computes on from the ranks of `role`.  shape: -1 stands for the batch."""
    assert value is not None, "a split graph gets its received values from outside"
    return value


def returned(value: Any) -> Any:
    """Give what the model returns, nested as it is, to the ranks that read data."""
    return value


def late_multiply(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer.  Backward all-gathers its input X and output error E; every rank computes dW = E^T X."""
    return torch.nn.functional.linear(value, weight, bias)


def linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer of which only this rank has a part; its gradient is computed while others travel."""
    return torch.nn.functional.linear(value, weight, bias)


def batch_norm(value: torch.Tensor, module: torch.nn.Module, *, own: bool = False) -> torch.Tensor:
    """Apply the BatchNorm `module` with statistics over all ranks of the role; own: see `all_reduce_scalar`."""
    normalised: torch.Tensor = module(value)
    return normalised


def pull(*, role: str, bucket: int) -> None:
    """Wait for the parameters of a bucket from the servers."""


def push(*, role: str, parameters: tuple[str, ...]) -> None:
    """Mark `parameters` whose gradients are sent to servers, which sum them over the workers."""


def all_reduce(*, role: str, parameters: tuple[str, ...], own: tuple[str, ...] = ()) -> None:
    """Mark `parameters` whose gradients are all-reduced over their replicas in `role`.

    own: those that every rank of a group uses on its own examples, which are summed over all ranks of the role.
    """


def all_reduce_scalar(value: torch.Tensor, *, own: bool = False) -> torch.Tensor:
    """All-reduce a scalar without gradient over the role: the denominator of a weighted mean.

    own: of this rank's own examples, not of those of its group.
    """
    return value


def global_weight(
    target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100, *, own: bool = False
) -> torch.Tensor:
    """Sum the class weights of all targets of the role's ranks; ignored targets count zero."""
    return target.new_zeros((), dtype=torch.int64 if weight is None else weight.dtype)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, *, features: int, **options: Any) -> torch.Tensor:
    """Compute `F.cross_entropy` of logits whose classes, `features` in all, are divided over the group.

    Forward all-reduces the largest logit of each row, then two sums; backward communicates nothing (LAYOUTS 3).
    """
    return F.cross_entropy(logits, target, **options)


def embedding(
    indices: torch.Tensor, weight: torch.Tensor, *, rows: int, padding_idx: int | None = None
) -> torch.Tensor:
    """Look up the indices that are in this rank's part of the `rows` of a table; others give zeros."""
    return F.embedding(indices, weight, padding_idx)


def scale_by_share(value: torch.Tensor, *, own: bool = False) -> torch.Tensor:
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
    own: bool = False,
) -> torch.Tensor:
    """Apply dropout with a mask that depends on seed, step, draw, example and position, not on the rank.

    draw: the ordinal of the random call in forward and loss.  feature_dims: leading dims of the mask; 0: all.
    dim, rows, outer: where its examples lie (see `Layout`).
    features: size of the whole last dim, of which the rank has a slice; None: it has all.
    evaluating: also in evaluation mode.  own: the value has this rank's own examples, not those of its group.
    """
    mode = running()
    return F.dropout(value, p) if mode is None else mode.mask(value, p, feature_dims, (draw,), Layout(dim, rows, outer))


def uniform(
    like: torch.Tensor, *, draw: int, dim: int | None = 0, rows: int = 1, outer: int = 1, own: bool = False
) -> torch.Tensor:
    """Numbers in [0, 1) in the shape and dtype of `like`, seeded as the masks of `dropout` are."""
    mode, like = running(), like.detach()
    return torch.rand_like(like) if mode is None else mode.numbers("uniform", like, (draw,), Layout(dim, rows, outer))


def normal(
    like: torch.Tensor, *, draw: int, dim: int | None = 0, rows: int = 1, outer: int = 1, own: bool = False
) -> torch.Tensor:
    """Numbers of the standard normal distribution in the shape and dtype of `like`, seeded likewise."""
    mode, like = running(), like.detach()
    return torch.randn_like(like) if mode is None else mode.numbers("normal", like, (draw,), Layout(dim, rows, outer))


def store_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Let a buffer of the model have `value` from the next training step on; all ranks that hold it compute it."""


class Over(Enum):
    """The ranks that an operation joins."""

    ROUTES = "the ranks of the peer role that have examples in common with this rank"
    GROUP = "the model-parallel group"
    REPLICAS = "the ranks of the role that hold the same parameters"
    SERVERS = "the parameter servers, or their workers"
    WORLD = "all ranks"


@dataclass(frozen=True)
class Call:
    """An operation called by a rank: its value, what it is given, and the examples that these are of."""

    value: TensorSpec
    given: tuple[Spec, ...]
    options: Mapping[str, Any]
    examples: int
    backward: bool


Tensors = Iterator[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of one tensor after the other."""


def _value(call: Call) -> Tensors:
    yield call.value.at(call.examples), call.value.dtype


def _statistics(call: Call) -> Tensors:
    """Sums of each channel, in forward with the number of values."""
    (value, *_), backward = call.given, call.backward
    assert isinstance(value, TensorSpec), value
    if value.requires_grad or not backward:
        yield (2 * call.value.shape[1] + (not backward),), _sum_dtype(call.value.dtype) if backward else torch.float64


def _of_classes(call: Call) -> Tensors:
    """The largest logit of each row, then the sums."""
    logits, target, *_ = call.given
    assert isinstance(logits, TensorSpec) and isinstance(target, TensorSpec), call
    (rows,) = target.at(call.examples)
    for numbers in (1, 3 if call.options.get("label_smoothing") else 2):
        yield (numbers, rows), _sum_dtype(logits.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are summed in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class CommOp:
    """One operation: a communication node, the adjoint of one, or an action of the step.

    adjoint: the operation that takes its gradient; None where none passes.
    in_stage: called within a stage's forward; the others are actions of the step.
    tensors: what a rank gives to its collective, one after the other; of a transition see `nbytes_sent`.
    draws: it draws random numbers.  denominator: its result is the same on all ranks of a role.
    finish: the action after the last backward that waits for the inputs and output errors of all its nodes in a stage,
    which travel in one gather, and multiplies them.
    """

    name: str
    collective: Collective
    over: Over | None = None
    adjoint: str | None = None
    in_stage: bool = False
    tensors: Callable[[Call], Tensors] = _value
    draws: bool = False
    denominator: bool = False
    finish: str = ""

    @property
    def backward(self) -> Collective:
        """What the gradient does on the wire; that of a transition see `transition_of`."""
        return Collective.NONE if self.adjoint is None else OPS[self.adjoint].collective


NODES: dict[Callable[..., Any], CommOp] = {
    send: CommOp("send", Collective.SEND, Over.ROUTES, "recv_grad"),
    recv: CommOp("recv", Collective.RECV, Over.ROUTES, "send_grad"),
    **{each: CommOp(each.__name__, forward_collective(each), Over.GROUP, in_stage=True) for each in TRANSITIONS},
    late_multiply: CommOp("late_multiply", Collective.NONE, Over.REPLICAS, "gather_errors", True, finish="multiply"),
    linear: CommOp("linear", Collective.NONE, in_stage=True),
    batch_norm: CommOp("batch_norm", Collective.ALL_REDUCE, Over.REPLICAS, "batch_norm", True, _statistics),
    all_reduce_scalar: CommOp(
        "all_reduce_scalar", Collective.ALL_REDUCE, Over.REPLICAS, in_stage=True, denominator=True
    ),
    global_weight: CommOp("global_weight", Collective.ALL_REDUCE, Over.REPLICAS, in_stage=True, denominator=True),
    cross_entropy: CommOp("cross_entropy", Collective.ALL_REDUCE, Over.GROUP, None, True, _of_classes),
    embedding: CommOp("embedding", Collective.NONE, in_stage=True),
    scale_by_share: CommOp("scale_by_share", Collective.NONE, None, "scale_by_share", in_stage=True),
    dropout: CommOp("dropout", Collective.NONE, None, "dropout", in_stage=True, draws=True),
    uniform: CommOp("uniform", Collective.NONE, in_stage=True, draws=True),
    normal: CommOp("normal", Collective.NONE, in_stage=True, draws=True),
    store_buffer: CommOp("store_buffer", Collective.NONE, in_stage=True),
    pull: CommOp("pull", Collective.RECV, Over.SERVERS, "push", in_stage=True),
    push: CommOp("push", Collective.SEND, Over.SERVERS, "pull"),
    all_reduce: CommOp("all_reduce", Collective.ALL_REDUCE, Over.REPLICAS, "all_reduce"),
}
"""The operations that are nodes of a graph, by their function."""

DRAWS = tuple(function for function, op in NODES.items() if op.draws)
"""The operations that draw random numbers."""

DENOMINATORS = tuple(function for function, op in NODES.items() if op.denominator)
"""The operations whose result is the same on all ranks of a role."""

OF_EXAMPLES = (*DRAWS, *DENOMINATORS, scale_by_share)
"""The operations that depend on which examples a value is of; `own=True` says that they are the rank's own."""

_NO_NODES = (
    CommOp("recv_grad", Collective.RECV, Over.ROUTES, "send"),
    CommOp("send_grad", Collective.SEND, Over.ROUTES, "recv"),
    CommOp("gather_errors", Collective.ALL_GATHER, Over.REPLICAS, "late_multiply", in_stage=True),
    CommOp("send_parameters", Collective.SEND, Over.SERVERS, "reduce_gradients"),
    CommOp("reduce_gradients", Collective.RECV, Over.SERVERS, "send_parameters"),
    CommOp("all_reduce_tied", Collective.ALL_REDUCE, None, "all_reduce_tied"),
    CommOp("sum_loss", Collective.ALL_REDUCE, Over.WORLD),
)
OPS = {op.name: op for op in (*NODES.values(), *_NO_NODES)}
"""Every operation, by the name of its node or action."""


def op_of(node: fx.Node) -> CommOp | None:
    """Return the operation that `node` is, None for other nodes."""
    return NODES.get(node.target) if callable(node.target) else None


def finish_of(node: fx.Node) -> str:
    """Return the action that finishes what a node sends, "" for other nodes."""
    return "" if (op := op_of(node)) is None else op.finish


def finishes(graph: fx.Graph) -> list[str]:
    """Return the actions that finish what nodes of a stage send."""
    return list(dict.fromkeys(filter(None, map(finish_of, graph.nodes))))
