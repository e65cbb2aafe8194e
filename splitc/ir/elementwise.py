"""Find nodes that can run on a shard of the features, and what they do there.

elementwise, casts, those that leave the last dim whole    features -> features
one column of each row that is given other values          features -> features
one column of each row that is taken                       features -> partial: zero where another rank has it
sums and means along the last dim, losses of each element  features -> partial
softmax, log_softmax; logsumexp                            features -> features; replicate
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.graph import arguments_of, info, op_name, shape_of
from splitc.ir.program import SizeSpec, TensorSpec
from splitc.ir.torch_ops import ops_with

_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(module, name)
    for module, trait in ((F, "F"), (torch, "torch"), (operator, "operator"))
    for name in ops_with(trait)
) | {comm_ops.dropout}
_METHODS = ops_with("method")


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node maps each element by itself; dropout counts as elementwise."""
    return node.target in (_METHODS if node.op == "call_method" else _FUNCTIONS)


def keeps_features(node: fx.Node) -> bool:
    """Whether a node changes the dims before the last alone: flatten(0, -2), view_as."""
    if node.target in ("flatten", torch.flatten):
        given = arguments_of(node, "input", "start_dim", "end_dim")
        end, num_dims = given.get("end_dim", -1), len(shape_of(given["input"]))
        return bool(end <= -2 or 0 <= end < num_dims - 1)
    return node.target in ("view_as", "reshape_as")


_CASTS = ops_with("cast")
_ALONG = {
    **dict.fromkeys(("transpose", "swapaxes"), slice(1, 3)),
    **dict.fromkeys("sum mean narrow select squeeze unflatten unsqueeze unbind cat concat stack".split(), slice(1, 2)),  # noqa: SIM905
    **dict.fromkeys(("chunk", "split"), slice(2, 3)),
}
"""Functions and methods -> which of their arguments are the dims that they work along."""


_OF_EACH = frozenset(getattr(F, name) for name in ops_with("each"))


def maps_each(node: fx.Node) -> bool:
    """Whether each element of a result follows from the same one of each operand: elementwise nodes, and casts."""
    return is_elementwise(node) or op_name(node) in _CASTS or reduction_of(node) == "none"


def reduction_of(node: fx.Node) -> str | None:
    """How a node reduces its values along dims of which the last is one, "sum" or "mean".

    Of a loss of each element also "none"; None for any other node.
    """
    if node.target in _OF_EACH:
        in_old_words = any(node.kwargs.get(name) is not None for name in ("reduce", "size_average"))
        return None if in_old_words else str(node.kwargs.get("reduction", "mean"))
    num_dims = len(shape_of(next(iter(node.all_input_nodes), None)))
    if op_name(node) not in ("sum", "mean") or not num_dims:
        return None
    dims = _flat([arguments_of(node, "input", "dim").get("dim")])
    along = dims in ([None], []) or any(dim % num_dims == num_dims - 1 for dim in dims)
    return op_name(node) if along else None


def normaliser_of(node: Any) -> str | None:
    """The name of a node that sums exponentials along the last dim: logsumexp, softmax or log_softmax; None else.

    None too where a reader needs its whole result, so that whole logits are sent as well.
    """
    if not isinstance(node, fx.Node) or op_name(node) not in ("logsumexp", "softmax", "log_softmax"):
        return None
    given = arguments_of(node, "input", "dim")
    num_dims, dims = len(shape_of(given.get("input"))), _flat([given.get("dim")])
    spec = info(node).spec
    is_wide = isinstance(spec, TensorSpec) and spec.dtype.itemsize >= 4  # else torch rounds but once
    fits = num_dims > 1 and dims in ([-1], [num_dims - 1]) and is_wide
    return op_name(node) if fits and (op_name(node) == "logsumexp" or all(map(_reads_features, node.users))) else None


def _reads_features(node: fx.Node) -> bool:
    on_features = maps_each(node) or leaves_last_dim(node) or reduction_of(node) or column_of(node)
    return bool(on_features) or node.target is F.nll_loss


def is_of_log_softmax(node: fx.Node) -> bool:
    """Whether a node is a loss that is the cross entropy of what its log_softmax reads."""
    return node.target is F.nll_loss and normaliser_of(node.args[0]) == "log_softmax"


class Column(NamedTuple):
    """One column of each row of a value (..., D): it is taken, or given others in a copy of the value.

    at: the columns, (...,) or (..., 1).  source: what they are given, a number or as many as columns; None: nothing.
    """

    value: fx.Node
    at: fx.Node
    source: Any = None


def column_of(node: fx.Node) -> Column | None:
    """`x.gather(1, index)`, `x[arange(n), index]`, `x.scatter(1, index, v)`, `x[arange(n), index] = v`; None else."""
    name, args = op_name(node), tuple[Any, ...]((*node.args, *node.kwargs.values()))
    value, given = (*args, None)[0], args[1:]
    shape = shape_of(value)
    if (name, len(given)) in (("gather", 2), ("scatter", 3)):
        (dim, index), rows = given[:2], (*shape[:-1], 1)
        fits = dim in (-1, len(shape) - 1)
    elif name in ("getitem", "assigned") and isinstance(given[0], tuple) and len(given[0]) == 2 == len(shape):
        (first, index), rows = given[0], shape[:1]
        size = first.args[-1] if isinstance(first, fx.Node) and first.target is torch.arange else None
        fits = isinstance(size, fx.Node) and info(size).spec == SizeSpec(*rows) and len(first.args) == 1
    else:
        return None
    source = [each for each in given[1 + (name == "scatter") :] if name in ("scatter", "assigned")]
    fits = fits and all(shape_of(each) == rows for each in (index, *source) if isinstance(each, fx.Node))
    return Column(value, index, *source) if fits and isinstance(index, fx.Node) else None


def is_view(node: fx.Node) -> bool:
    """Whether a node gives its value another shape, of the same last dim: view(-1, 1000)."""
    before, after = shape_of(next(iter(node.all_input_nodes), None)), shape_of(node)
    to_size = op_name(node) in ("view", "reshape") and isinstance(node.args[-1], (int, fx.Node))
    return to_size and bool(before) and before[-1:] == after[-1:]


def leaves_last_dim(node: fx.Node) -> bool:
    """Whether a node selects, moves, casts or sums along the dims before the last alone: x[:, :-1], x.mean(1)."""
    name, num_dims = op_name(node), len(shape_of(next(iter(node.all_input_nodes), None)))
    if keeps_features(node) or is_view(node) or name in _CASTS:
        return True
    if name == "getitem":
        return not num_dims or _indexes_before_last(node.args[1], num_dims)
    if name == "permute":
        return _flat(node.args[1:])[-1:] in ([-1], [num_dims - 1])
    if name not in _ALONG or not num_dims:
        return False
    dims = _flat(node.args[_ALONG[name]]) or _flat(
        [node.kwargs.get("dim", -1 if name in ("sum", "mean", "squeeze") else 0)]
    )
    last = num_dims if name in ("unsqueeze", "stack") else num_dims - 1
    return all(isinstance(dim, int) and dim not in (last, -1) for dim in dims)


def reads_no_numbers(node: fx.Node) -> bool:
    """Whether a node reads the device of a tensor, or the size of a dim before the last."""
    size = node.target == "size" and _flat(node.args[1:])[-1:] not in ([-1], [len(shape_of(node.args[0])) - 1], [])
    return size or (node.target is getattr and node.args[1] in ("device", "dtype"))


def _indexes_before_last(index: Any, num_dims: int) -> bool:
    """Whether an index has numbers and slices only, and all of the last dim."""
    parts = index if isinstance(index, tuple) else (index,)
    dims = [part for part in parts if part is not None]
    if parts[-1] is None or not all(isinstance(part, (int, slice, type(...))) for part in dims):
        return False
    return dims[-1] in (..., slice(None)) or (... not in dims and len(dims) < num_dims)


def _flat(dims: Any) -> list[Any]:
    return [each for dim in dims for each in (dim if isinstance(dim, (tuple, list)) else (dim,))]
