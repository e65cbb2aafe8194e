"""Nodes that run on a shard of the features: each element by itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.elementwise import _FUNCTIONS, is_elementwise
from splitc.ir.op_names import function_name

FUNCTIONS = sorted(_FUNCTIONS - {comm_ops.dropout}, key=function_name)


def call(op: str, target: Any) -> fx.Node:
    graph = fx.Graph()
    return graph.create_node(op, target, (graph.placeholder("x"),))


def test_an_elementwise_function_of_a_shard_is_the_shard_of_the_function() -> None:
    x, y = torch.rand(3, 8) + 0.5, torch.rand(3, 8) + 0.5
    others: dict[str, tuple[Any, ...]] = {"F.threshold": (1.0, 0.0), "torch.clamp": (0.6, 0.9)}
    for function in FUNCTIONS:
        binary = function.__name__ in ("add", "sub", "mul", "div", "true_divide", "truediv", "pow")
        whole = function(x, *([y] if binary else others.get(function_name(function), ())))
        part = function(x[:, 2:5], *([y[:, 2:5]] if binary else others.get(function_name(function), ())))
        torch.testing.assert_close(part, whole[:, 2:5], msg=function_name(function))


def test_what_reads_other_features_is_not_elementwise() -> None:
    functions: tuple[Any, ...] = (F.softmax, F.layer_norm, torch.sum, torch.cat, F.linear, torch.cumsum)
    assert not any(is_elementwise(call("call_function", function)) for function in functions)


def test_methods_and_dropout_count_too() -> None:
    assert is_elementwise(call("call_method", "relu")) and not is_elementwise(call("call_method", "softmax"))
    assert is_elementwise(call("call_function", comm_ops.dropout))
