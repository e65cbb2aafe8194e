"""Bound the values of integer inputs by the nodes that read them, so that synthetic batches are valid.

Columns of one tensor may index tables of different sizes: every element is followed through views, and sums with
constants (where a table begins inside another one), to what reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from splitc.ir import comm_ops
from splitc.ir.graph import arguments_of, called_module, info, op_name, shape_of, tensor_spec
from splitc.ir.program import SizeSpec
from splitc.ir.torch_ops import ops_with

_SAME, _VIEWS = ops_with("same_numbers"), ops_with("view")
_LARGE = 1 << 24  # elements; more are not followed
_PLACE = 32  # an element is followed as its place, times two to this power, and what was added to it
_UNBOUND = 1 << 62


def class_bound(node: fx.Node, root: nn.Module, seen: Tensor, constant: Callable[[str], Tensor | None]) -> Any:
    """An exclusive upper bound of the whole numbers in `node`, an input like `seen`; None where its readers imply none.

    Class numbers are bounded by the number of logits, indices of an embedding by its rows; where some columns are
    bounded, the others are by the largest number seen: then nested lists, which broadcast against the tensor.
    constant: a parameter or buffer by name, or None.
    """
    spec = tensor_spec(node)
    dim = spec.batch_dim or 0
    batch = max(*seen.shape[dim : dim + 1], 2, 2)
    sizes = torch.Size(spec.at(batch))
    if sizes.numel() > _LARGE:
        return None
    found, followed = torch.full(sizes, _UNBOUND), {node: torch.arange(sizes.numel()).view(sizes) << _PLACE}
    for user in node.graph.nodes:
        for value in followed.keys() & set(user.all_input_nodes):
            if (bound := _bound_of(value, user, root)) is not None:
                at = (followed[value] + (1 << _PLACE - 1)) >> _PLACE
                limits = (bound - followed[value] + (at << _PLACE)).clamp_min(1)
                found.view(-1).scatter_reduce_(0, at.flatten(), limits.flatten(), "amin")
            elif (passed := _passed(user, value, followed[value], batch, constant)) is not None:
                followed[user] = passed
    bounds = found.amin(dim, keepdim=True)
    known = bounds[bounds < _UNBOUND]
    if not known.numel() or seen.is_floating_point() or seen.is_meta or not seen.numel():
        return int(known.min()) if known.numel() else None
    bounds = torch.where(bounds < _UNBOUND, bounds, seen.amax(dim, keepdim=True).cpu() + 1)
    for each in range(bounds.dim()):
        first = bounds.narrow(each, 0, 1)
        bounds = first if bool((first == bounds).all()) else bounds
    return int(bounds) if bounds.numel() == 1 else bounds.tolist()


def are_counts(tensor: Tensor) -> bool:
    """Whether floats are different whole numbers from 0 on, as labels of several classes are."""
    known = tensor.device.type != "meta" and tensor.numel() > 0 and bool(tensor.isfinite().all())
    return known and 0 <= float(tensor.min()) < float(tensor.max()) and bool((tensor == tensor.round()).all())


def _passed(user: fx.Node, value: fx.Node, elements: Any, batch: int, constant: Callable[[str], Tensor | None]) -> Any:
    """The elements of the result, of a view or a sum with constants; None of anything else."""
    name, given = op_name(user), {value: elements}
    target: Any = "reshape" if user.target == "view" else user.target  # the elements may lie otherwise in memory
    if name in _SAME:
        return elements
    for each in set(user.all_input_nodes) - {value}:
        spec = info(each).spec
        if each.op == "get_attr" and (values := constant(str(each.target))) is not None:
            given[each] = values.cpu()
        elif isinstance(spec, SizeSpec):
            given[each] = spec.scale * batch + spec.offset
    adds = not user.kwargs and (name == "add" or (name == "sub" and user.args[0] is value))
    views = user.args[:1] == (value,) and (name in _VIEWS or (target is getattr and user.args[1] in ("T", "mT")))
    views = views and not isinstance(user.args[-1], torch.dtype)
    if not (adds or views) or len(given) < len(user.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((user.args, user.kwargs), given.__getitem__)
    made = getattr(Tensor, target)(*args, **kwargs) if isinstance(target, str) else target(*args, **kwargs)
    return None if adds and made.is_floating_point() else made


def _bound_of(value: fx.Node, user: fx.Node, root: nn.Module) -> int | None:
    if user.target in (F.cross_entropy, F.nll_loss) and len(user.args) > 1 and user.args[1] is value:
        sizes = shape_of(user.args[0])
        return sizes[min(1, len(sizes) - 1)] if sizes else None
    if user.target is comm_ops.linear_cross_entropy and user.kwargs["target"] is value:
        return shape_of(user.args[1])[0]
    if isinstance(module := called_module(root, user), nn.Embedding | nn.EmbeddingBag):
        return module.num_embeddings
    if op_name(user) == "getitem" and user.args[1] is value and isinstance(user.args[0], fx.Node):
        return next(iter(shape_of(user.args[0])), None)  # a table read by its rows
    if user.target in (F.embedding, F.embedding_bag):
        return next(iter(shape_of(arguments_of(user, "input", "weight")["weight"])), None)
    if user.target is F.one_hot:
        classes = arguments_of(user, "tensor", "num_classes").get("num_classes")
        return classes if isinstance(classes, int) and classes > 0 else None
    return None
