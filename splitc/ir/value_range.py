"""Bound the values of integer inputs by the nodes that read them, so that synthetic batches are valid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn

from splitc.ir.graph import arguments_of, called_module, op_name, shape_of

_PASSING = {"view", "reshape", "flatten", "contiguous", "long", "to", "squeeze", "unsqueeze", "transpose", "getitem"}


def class_bound(node: fx.Node, root: nn.Module) -> int | None:
    """An exclusive upper bound of the integer tensor `node`; None where its readers imply none.

    Class numbers are bounded by the number of logits, indices of an embedding by its rows.
    """
    bounds = [bound for user in node.users if (bound := _bound_of(node, user, root)) is not None]
    return min(bounds, default=None)


def _bound_of(value: fx.Node, user: fx.Node, root: nn.Module) -> int | None:
    if user.target in (F.cross_entropy, F.nll_loss) and len(user.args) > 1 and user.args[1] is value:
        sizes = shape_of(user.args[0])
        return sizes[min(1, len(sizes) - 1)] if sizes else None
    if isinstance(module := called_module(root, user), nn.Embedding | nn.EmbeddingBag):
        return module.num_embeddings
    if user.target in (F.embedding, F.embedding_bag):
        return next(iter(shape_of(arguments_of(user, "input", "weight")["weight"])), None)
    if user.target is F.one_hot:
        classes = arguments_of(user, "tensor", "num_classes").get("num_classes")
        return classes if isinstance(classes, int) and classes > 0 else None
    return class_bound(user, root) if op_name(user) in _PASSING else None
