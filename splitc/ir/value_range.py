"""Bound the values of integer inputs by the nodes that read them, so that synthetic batches are valid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn

from splitc.ir.graph import info
from splitc.ir.program import TensorSpec

_PASSING = {"view", "reshape", "flatten", "contiguous", "long", "to", "squeeze", "unsqueeze", "transpose", "getitem"}


def class_bound(node: fx.Node, root: nn.Module) -> int | None:
    """An exclusive upper bound of the integer tensor `node`; None where its readers imply none.

    Class numbers are bounded by the number of logits, indices of an embedding by its rows.
    """
    bounds = [bound for user in node.users if (bound := _bound_of(node, user, root)) is not None]
    return min(bounds, default=None)


def _bound_of(value: fx.Node, user: fx.Node, root: nn.Module) -> int | None:
    if user.target in (F.cross_entropy, F.nll_loss) and len(user.args) > 1 and user.args[1] is value:
        logits = user.args[0]
        spec = info(logits).spec if isinstance(logits, fx.Node) else None
        return spec.shape[1 if len(spec.shape) > 1 else 0] if isinstance(spec, TensorSpec) else None
    if user.op == "call_module":
        module = root.get_submodule(str(user.target))
        return module.num_embeddings if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
    if user.target in (F.embedding, F.embedding_bag) and len(user.args) > 1 and isinstance(user.args[1], fx.Node):
        spec = info(user.args[1]).spec
        return spec.shape[0] if isinstance(spec, TensorSpec) else None
    if user.target is F.one_hot:
        classes = user.args[1] if len(user.args) > 1 else user.kwargs.get("num_classes")
        return classes if isinstance(classes, int) and classes > 0 else None
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    return class_bound(user, root) if name in _PASSING else None
