"""Nodes that run on a shard of the features: each element by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.elementwise import _FUNCTIONS, is_elementwise
from splitc.ir.op_names import function_name

BINARY = (
    *("add", "sub", "mul", "div", "true_divide", "truediv", "pow", "maximum", "minimum", "logical_and", "logical_or"),
    *("eq", "ge", "gt", "le", "lt", "ne", "and_", "or_"),
)
FUNCTIONS = sorted(_FUNCTIONS - {comm_ops.dropout}, key=function_name)


def call(op: str, target: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.create_node(op, target, (graph.placeholder("x"),))


def test_an_elementwise_function_of_a_shard_is_the_shard_of_the_function() -> None:
    x, y = torch.rand(3, 8) + 0.5, torch.rand(3, 8) + 0.5
    others: dict[str, tuple[Any, ...]] = {"threshold": (1.0, 0.0), "clamp": (0.6, 0.9), "full_like": (0.5,)}
    others |= dict.fromkeys(("clamp_max", "clamp_min"), (0.8,))
    of_truths = ("logical_and", "logical_not", "logical_or", "and_", "invert", "or_")
    for function in FUNCTIONS:
        name = function_name(function).rpartition(".")[2]
        given = [x > 1, y > 1] if name in of_truths else [x - 0.5 if name in ("acos", "asin") else x, y]
        given = {"where": [x > 1, x, y], "masked_fill": [x, x > 1, torch.tensor(0.5)]}.get(
            name, given if name in BINARY else given[:1]
        )
        parts = [each[:, 2:5] if each.dim() else each for each in given]
        whole, part = function(*given, *others.get(name, ())), function(*parts, *others.get(name, ()))
        torch.testing.assert_close(part, whole[:, 2:5], msg=function_name(function), equal_nan=True)


def test_what_reads_other_features_is_not_elementwise() -> None:
    functions: tuple[Any, ...] = (F.softmax, F.layer_norm, torch.sum, torch.cat, F.linear, torch.cumsum)
    assert not any(is_elementwise(call("call_function", function)) for function in functions)


def test_methods_and_dropout_count_too() -> None:
    assert is_elementwise(call("call_method", "relu")) and not is_elementwise(call("call_method", "softmax"))
    assert is_elementwise(call("call_function", comm_ops.dropout))
