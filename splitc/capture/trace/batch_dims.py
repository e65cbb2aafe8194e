"""Infer the shape of every value of a captured graph at any batch size, and which values the gradient reaches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from splitc.errors import CaptureError
from splitc.ir.graph import info, update_info
from splitc.ir.program import SizeSpec, Spec, TensorSpec
from splitc.runtime.nested import tensors


def set_specs(
    graph: fx.Graph,
    values: Mapping[fx.Node, tuple[Any, ...]],
    probes: tuple[int, ...],
    is_linear: Callable[[fx.Node], bool | None],
) -> None:
    """Set the spec of every node from its values at the batch sizes `probes`.  is_linear: see `NodeInfo`."""
    for node in graph.nodes:
        spec = infer_spec(values[node], probes) if node in values else None
        update_info(node, spec=spec, is_linear=is_linear(node))


def infer_spec(values: tuple[Any, ...], probes: tuple[int, ...]) -> Spec:
    """The spec of a value, from its values at the batch sizes `probes` (of a tensor: at the first two).

    None unless it is a tensor with at most one batch dimension, or a whole number linear in the batch size.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _tensor_spec(first, values[1], probes)
    if isinstance(first, (tuple, list)):
        return tuple(infer_spec(parts, probes) for parts in zip(*values, strict=True))
    if type(first) is int and len(values) == len(probes):
        scale = (values[1] - first) // (probes[1] - probes[0])
        spec = SizeSpec(scale, first - scale * probes[0])
        is_linear = all(value == scale * probe + spec.offset for value, probe in zip(values, probes, strict=True))
        return spec if is_linear else None
    return None


def _tensor_spec(first: torch.Tensor, second: torch.Tensor, probes: tuple[int, ...]) -> TensorSpec | None:
    differing = [d for d, (m, n) in enumerate(zip(first.shape, second.shape, strict=True)) if m != n]
    shape = list(first.shape)
    if not differing:
        return TensorSpec(tuple(shape), first.dtype, None, first.requires_grad)
    dim = differing[0]
    rows, rest = divmod(shape[dim], probes[0])
    if len(differing) > 1 or rest or rows * probes[1] != second.shape[dim]:
        return None  # the batch appears twice (a similarity matrix of examples), or in part: it stays on one rank
    shape[dim] = rows
    return TensorSpec(tuple(shape), first.dtype, dim, first.requires_grad)


def prune_gradients(graph: fx.Graph, values: Mapping[fx.Node, tuple[Any, ...]]) -> set[fx.Node]:
    """Return the nodes that the gradient of the loss reaches; clear `requires_grad` in the specs of the others."""
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read = any(user.op == "output" or user in reached for user in node.users)
        if is_read and any(tensor.requires_grad for _, tensor in tensors(values.get(node, ())[:1])):
            reached.add(node)
        else:
            update_info(node, spec=_without_grad(info(node).spec))
    return reached


def _without_grad(spec: Spec) -> Spec:
    if isinstance(spec, tuple):
        return tuple(map(_without_grad, spec))
    return replace(spec, requires_grad=False) if isinstance(spec, TensorSpec) else spec


def require_whole_batch(graph: fx.Graph) -> None:
    """Raise CaptureError for a node that indexes particular examples: each rank has other examples at that index."""
    for node in graph.nodes:
        value = node.args[0] if node.args else None
        spec = info(value).spec if isinstance(value, fx.Node) else None
        if (
            isinstance(spec, TensorSpec)
            and spec.batch_dim is not None
            and _selects_rows(node, spec.batch_dim, len(spec.shape))
        ):
            raise CaptureError(
                f"{info(node).source}: {node.name} takes particular examples of the batch, and each rank has other "
                f"ones; write x.size(0) where the batch size is meant, and operations over the whole batch otherwise"
            )


def _selects_rows(node: fx.Node, batch_dim: int, dims: int) -> bool:
    if node.target is operator.getitem:
        index = _index_at(node.args[1], batch_dim, dims)
    elif node.op == "call_method" and node.target in ("select", "narrow") and len(node.args) > 2:
        index = node.args[2] if node.args[1] in (batch_dim, batch_dim - dims) else None
    else:
        return False
    if isinstance(index, slice):
        return any(
            type(bound) is int and bound != neutral
            for bound, neutral in ((index.start, 0), (index.stop, None), (index.step, 1))
        )
    return type(index) is int


def _index_at(key: Any, dim: int, dims: int) -> Any:
    """The part of an index that acts on dimension `dim`; None where that is unknown."""
    parts = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(part, (fx.Node, list, bool)) for part in parts):
        return None
    consuming = [part for part in parts if part is not None and part is not ...]
    if ... in parts:
        before = [part for part in parts[: parts.index(...)] if part is not None]
        if dim < len(before):
            return before[dim]
        from_end = dims - dim
        after = len(consuming) - len(before)
        return consuming[len(consuming) - from_end] if from_end <= after else None
    return consuming[dim] if dim < len(consuming) else None
