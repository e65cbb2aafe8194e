"""Bring the examples of a value side by side before it travels, where the rows of an example lie apart.

Two views of b examples, read elsewhere:

    z = cat([a, b])             z_apart = z.unflatten(0, (2, -1))        (2, b, 12)
    similar = z @ z.t()    ->   cut0 = recv(send(z_apart))               (2, B, 12)
                                z_joined = cut0.flatten(0, -2)           (2 B, 12)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from splitc.ir.graph import info, rename, set_info, tensor_spec
from splitc.ir.program import TensorSpec


def unflattened(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """The value with a dim for the rows that lie apart, after it."""
    spec, outer = tensor_spec(value), info(value).outer
    dim = spec.batch_dim
    assert dim is not None and outer > 1
    shape = (*spec.shape[:dim], outer, spec.rows // outer, *spec.shape[dim + 1 :])
    new = _after(graph, value, "unflatten", (value, dim, (outer, -1)), f"{value.name}_apart")
    apart = TensorSpec(shape, spec.dtype, dim + 1, spec.requires_grad)
    set_info(new, info(value), spec=apart, outer=1, cut=None, shards={})
    return new


def flattened(graph: fx.Graph, moved: fx.Node, like: fx.Node, **changes: Any) -> fx.Node:
    """What `unflattened` made of `like`, moved to where it is read, in the shape of `like` again."""
    dim, dims = tensor_spec(like).batch_dim, len(tensor_spec(moved).shape)
    assert dim is not None
    new = _after(graph, moved, "flatten", (moved, dim, dim + 1 - dims), f"{like.name}_joined")
    set_info(new, info(like), **{"cut": None, "shards": {}, **changes})
    return new


def _after(graph: fx.Graph, value: fx.Node, method: str, args: tuple[Any, ...], name: str) -> fx.Node:
    with graph.inserting_after(value):
        new = graph.call_method(method, args)
    rename(graph, new, name)
    return new
