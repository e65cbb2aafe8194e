"""Nodes that run on a shard of the features: each element by itself."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("function", FUNCTIONS, ids=function_name)
def test_an_elementwise_function_of_a_shard_is_the_shard_of_the_function(function: Any) -> None:
    x, y = torch.rand(3, 8) + 0.5, torch.rand(3, 8) + 0.5
    arguments: dict[str, tuple[Any, ...]] = {"F.threshold": (1.0, 0.0), "torch.clamp": (0.6, 0.9)}
    binary = function.__name__ in ("add", "sub", "mul", "div", "true_divide", "truediv", "pow")

    def run(columns: slice) -> Any:
        return function(x[:, columns], *([y[:, columns]] if binary else arguments.get(function_name(function), ())))

    torch.testing.assert_close(run(slice(2, 5)), run(slice(None))[:, 2:5])


@pytest.mark.parametrize("function", [F.softmax, F.layer_norm, torch.sum, torch.cat, F.linear, torch.cumsum])
def test_what_reads_other_features_is_not_elementwise(function: Any) -> None:
    assert not is_elementwise(call("call_function", function))


def test_methods_and_dropout_count_too() -> None:
    assert is_elementwise(call("call_method", "relu")) and not is_elementwise(call("call_method", "softmax"))
    assert is_elementwise(call("call_function", comm_ops.dropout))
