"""Which nodes make every element of their output of the input elements at its place: they run on parts of features."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc import comm_ops
from splitc.dropouts import DROPOUTS

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
    """Whether a node treats every element alike and alone; dropout does."""
    if node.op == "call_method":
        return node.target in _METHODS
    return node.target in _FUNCTIONS or node.target in DROPOUTS
