"""Copying graphs, and which tensors their nodes read and update."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from splitc.ir.graph import assigned, changes_statistics, copy_graph, info, rename, tensors_of_node, update_info
from tests.support.capturing import capture, node
from tests.support.models import made


def pair_graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (x,)))
    return graph


def test_a_copy_keeps_names_and_records_and_changing_it_leaves_the_original() -> None:
    graph = pair_graph()
    relu = next(n for n in graph.nodes if n.name == "relu")
    update_info(relu, source="model.py:3")
    copied, mapping = copy_graph(graph)
    assert str(copied) == str(graph) and info(mapping[relu]).source == "model.py:3"
    update_info(mapping[relu], source="model.py:4")
    assert info(relu).source == "model.py:3"


def test_a_node_that_takes_a_name_in_use_gets_a_suffix() -> None:
    graph = pair_graph()
    x, relu, _ = graph.nodes
    rename(graph, relu, "y")
    assert relu.name == "y"
    rename(graph, relu, x.name)
    assert relu.name == "x_1" and x.name == "x"


def test_a_tied_parameter_is_read_under_its_first_name() -> None:
    model = made(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.get_submodule("b").weight = model.get_submodule("a").weight
    program = capture(model, (torch.randn(3, 4),), torch.randn(3, 4), F.mse_loss)
    reads = {name: tensors_of_node(program, node(program, name)) for name in ("a", "b")}
    assert reads == {"a": ("a.weight", "a.bias"), "b": ("a.weight", "b.bias")}


def test_norms_change_running_statistics_where_they_use_those_of_the_batch() -> None:
    norms: list[tuple[Any, dict[str, Any], bool]] = [
        (F.batch_norm, {"running_mean": "x", "running_var": "x", "training": True}, True),
        (F.batch_norm, {"running_mean": "x", "running_var": "x"}, False),
        (F.batch_norm, {"training": True}, False),
        (F.instance_norm, {"running_mean": "x", "running_var": "x"}, True),
        (F.instance_norm, {"running_mean": "x", "running_var": "x", "use_input_stats": False}, False),
        (F.layer_norm, {"normalized_shape": (3,)}, False),
    ]
    for function, arguments, changes in norms:
        graph = fx.Graph()
        x = graph.placeholder("x")
        norm = graph.call_function(function, (x,), {k: x if v == "x" else v for k, v in arguments.items()})
        assert changes_statistics(norm) is changes


def test_an_assignment_changes_a_copy_and_passes_the_gradient_of_what_is_left() -> None:
    given: Tensor = torch.ones(3, requires_grad=True)
    new = assigned(given, 1, 5.0)
    assert new.tolist() == [1.0, 5.0, 1.0] and given.tolist() == [1.0, 1.0, 1.0]
    new.sum().backward()
    assert given.grad is not None and given.grad.tolist() == [1.0, 0.0, 1.0]
