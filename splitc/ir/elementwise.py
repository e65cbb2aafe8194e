"""Find elementwise nodes, which can run on a shard of the features."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops

_FUNCTIONS: frozenset[Any] = frozenset(
    getattr(module, name)
    for module, names in (
        (F, "relu gelu silu mish elu selu celu leaky_relu relu6 hardtanh hardswish hardsigmoid softplus softsign "
            "logsigmoid tanhshrink softshrink hardshrink threshold sigmoid tanh"),
        (torch, "relu tanh sigmoid exp log sqrt rsqrt square abs neg sin cos clamp add sub mul div true_divide"),
        (operator, "add sub mul truediv neg pow"),
    )
    for name in names.split()
) | {comm_ops.dropout}  # fmt: skip
_METHODS = {"relu", "tanh", "sigmoid", "exp", "abs", "neg", "square", "clamp", "add", "sub", "mul", "div"}


def is_elementwise(node: fx.Node) -> bool:
    """Whether a node maps each element by itself; dropout counts as elementwise."""
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target in _FUNCTIONS


def keeps_features(node: fx.Node) -> bool:
    """Whether a node changes the dims before the last alone, whatever the size of the last: flatten(0, -2), view_as."""
    if node.target in ("flatten", torch.flatten):
        given: Any = dict(zip(("input", "start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
        return bool(given.get("end_dim", -1) == -2)
    return node.target in ("view_as", "reshape_as")
