"""The communication operations, each defined once: printer, prices, memory, checks and codegen read `NODES`.

A communication node calls one of the functions below.  On (fake) tensors each computes what a single rank would see, so
a graph with communication runs for its shapes; at run time the method of `splitc.runtime.RoleComm` of the same name
communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir.comm_tensors import Call, Tensors, of_classes, own_value, statistics
from splitc.ir.schedule.verb import Among
from splitc.ir.transitions import TRANSITIONS, Collective
from splitc.runtime.collectives.divided_layers import chunked_cross_entropy
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


def gather_indices(indices: Sequence[torch.Tensor]) -> None:
    """Begin to all-gather the indices of late tables, which travel under forward and backward."""


def late_embedding(
    indices: torch.Tensor, weight: torch.Tensor, *, pool: str = "", gathered: int | None = None, **options: Any
) -> torch.Tensor:
    """Look up rows of a table.  Backward all-gathers indices and output errors; every rank adds them to its rows.

    pool: the method, sum or mean, that makes one row of those of each example.
    gathered: which of those of `gather_indices` the indices are; None: they travel with the errors.
    options: of `F.embedding`.
    """
    rows = F.embedding(indices, weight, **options)
    return getattr(rows, pool)(1) if pool else rows


def late_embedding_bag(
    indices: torch.Tensor, weight: torch.Tensor, *, gathered: int | None = None, **options: Any
) -> torch.Tensor:
    """Sum or average rows of bags, whose indices and weights, and the bags' errors, are all-gathered likewise."""
    return F.embedding_bag(indices, weight, **options)


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


def linear_cross_entropy(
    value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, features: int = 0, **options: Any
) -> torch.Tensor:
    """Compute the cross entropy of a linear layer's result, chunk by chunk of its rows (see `chunked_cross_entropy`).

    features: the classes, where a group divides them; then it communicates as `cross_entropy` does.
    """
    return chunked_cross_entropy(value, weight, bias, **options)


def logsumexp(value: torch.Tensor, *, features: int, keepdim: bool = False) -> torch.Tensor:
    """Compute the logsumexp of each row of `features` of which ranks have parts.

    Forward all-reduces the largest of each row, then a sum; backward communicates nothing.
    """
    return value.logsumexp(-1, keepdim)


def pick(value: torch.Tensor, index: torch.Tensor, *, features: int) -> torch.Tensor:
    """Take one of `features` columns of each row, zero where this rank has another part.  index: (...,) or (..., 1)."""
    index, shape = index if index.dim() == value.dim() else index.unsqueeze(-1), index.shape
    return value.gather(-1, index).view(shape)


def put(value: torch.Tensor, index: torch.Tensor, source: Any, *, features: int) -> torch.Tensor:
    """Give one of `features` columns of each row another number, on the rank that has it.  index: as of `pick`."""
    index = index if index.dim() == value.dim() else index.unsqueeze(-1)
    return value.scatter(-1, index, source.view_as(index) if isinstance(source, torch.Tensor) else source)


def scale_by_part(value: torch.Tensor, *, features: int) -> torch.Tensor:
    """Multiply a mean over this rank's part of `features` by that part, so that the ranks' values sum to the mean."""
    return value * 1.0


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
    features: int | None = None,
    evaluating: bool = False,
    own: bool = False,
    **where: Any,
) -> torch.Tensor:
    """Apply dropout with a mask that depends on seed, step, draw, example and position, not on the rank.

    draw: the ordinal of the random call in forward and loss.  feature_dims: leading dims of the mask; 0: all.
    where: its examples lie: dim, rows, outer of a `Layout`.
    features: size of the whole last dim, of which the rank has a slice; None: it has all.
    evaluating: also in evaluation mode.  own: the value has this rank's own examples, not those of its group.
    """
    mode = running()
    return F.dropout(value, p) if mode is None else mode.mask(value, p, feature_dims, (draw,), Layout(**where))


def uniform(like: torch.Tensor, *, draw: int, own: bool = False, **where: Any) -> torch.Tensor:
    """Numbers in [0, 1) in the shape and dtype of `like`, seeded as the masks of `dropout` are."""
    mode, like = running(), like.detach()
    return torch.rand_like(like) if mode is None else mode.numbers("uniform", like, (draw,), Layout(**where))


def normal(like: torch.Tensor, *, draw: int, own: bool = False, **where: Any) -> torch.Tensor:
    """Numbers of the standard normal distribution in the shape and dtype of `like`, seeded likewise."""
    mode, like = running(), like.detach()
    return torch.randn_like(like) if mode is None else mode.numbers("normal", like, (draw,), Layout(**where))


def store_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Let a buffer of the model have `value` from the next training step on; all ranks that hold it compute it."""


@dataclass(frozen=True)
class CommOp:
    """One operation: what it communicates over which ranks, and what the gradient does.

    in_stage: called within a stage's forward; the others are actions of the step.  tensors: what a rank gives to its
    collective, one after the other; both of a transition see `transition_of`.
    draws: it draws random numbers.  denominator: its result is the same on all ranks of a role.
    finish: the action after the last backward that waits for the inputs and output errors of all its nodes in a stage,
    which travel in a gather of each dtype, indices perhaps from forward on, and makes gradients of them.
    """

    collective: Collective = Collective.NONE
    among: Among = Among.NONE
    backward: Collective = Collective.NONE
    in_stage: bool = True
    tensors: Callable[[Call], Tensors] = own_value
    draws: bool = False
    denominator: bool = False
    finish: str = ""


_SUM, _GATHER = Collective.ALL_REDUCE, Collective.ALL_GATHER
NODES: dict[Callable[..., Any], CommOp] = {
    send: CommOp(Collective.SEND, Among.PAIR, Collective.RECV, in_stage=False),
    recv: CommOp(Collective.RECV, Among.PAIR, Collective.SEND, in_stage=False),
    **{node: CommOp(collective, Among.GROUP) for node, collective in TRANSITIONS.items()},
    **dict.fromkeys(
        (late_multiply, late_embedding, late_embedding_bag),
        CommOp(among=Among.REPLICAS, backward=_GATHER, finish="multiply"),
    ),
    gather_indices: CommOp(_GATHER, Among.REPLICAS, finish="multiply"),
    batch_norm: CommOp(_SUM, Among.REPLICAS, _SUM, tensors=statistics),
    all_reduce_scalar: CommOp(_SUM, Among.REPLICAS, denominator=True),
    global_weight: CommOp(_SUM, Among.REPLICAS, denominator=True),
    **dict.fromkeys((cross_entropy, linear_cross_entropy, logsumexp), CommOp(_SUM, Among.GROUP, tensors=of_classes)),
    **dict.fromkeys((linear, embedding, pick, put, scale_by_part, scale_by_share, store_buffer, pull), CommOp()),
    **dict.fromkeys((dropout, uniform, normal), CommOp(draws=True)),
    push: CommOp(in_stage=False),
    all_reduce: CommOp(_SUM, Among.REPLICAS, in_stage=False),
}
"""The operations that are nodes of a graph, by their function."""

FUNCTIONS = {function.__name__: function for function in NODES}
"""Name of a node -> its function."""

DRAWS = tuple(function for function, op in NODES.items() if op.draws)
"""The operations that draw random numbers."""

DENOMINATORS = tuple(function for function, op in NODES.items() if op.denominator)
"""The operations whose result is the same on all ranks of a role."""

OF_EXAMPLES = (*DRAWS, *DENOMINATORS, scale_by_share)
"""The operations that depend on which examples a value is of; `own=True` says that they are the rank's own."""


def op_of(node: fx.Node) -> CommOp | None:
    """Return the operation that `node` is, None for other nodes."""
    return NODES.get(node.target) if callable(node.target) else None


def sums_classes(node: fx.Node) -> bool:
    """Whether a node has a rank's part of a loss over classes, with its weight, and gives the whole loss."""
    return node.target is linear_cross_entropy and "features" in node.kwargs


def finish_of(node: fx.Node) -> str:
    """Return the action that finishes what a node sends, "" for other nodes."""
    return "" if (op := op_of(node)) is None else op.finish


def finishes(graph: fx.Graph) -> list[str]:
    """Return the actions that finish what nodes of a stage send."""
    return list(dict.fromkeys(filter(None, map(finish_of, graph.nodes))))
