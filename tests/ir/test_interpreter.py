"""Graphs on fake tensors: copies without memory, and shapes at other batches."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from splitc.errors import CaptureError
from splitc.ir.graph import copy_graph, tensor_spec, update_info
from splitc.ir.interpreter import NodeRunner, fake_copy, shapes_at
from tests.support.capturing import node
from tests.support.pair import analysed_pair


def test_a_fake_copy_keeps_ties_and_leaves_the_model_real() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fake = fake_copy(model, FakeTensorMode())
    assert fake.get_parameter("0.weight") is fake.get_parameter("1.weight")
    assert all(isinstance(p, FakeTensor) for p in fake.parameters())
    assert not any(isinstance(p, FakeTensor) for p in model.parameters())


def test_a_module_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"Linear cannot be copied: TypeError: .*lock"):
        fake_copy(model, FakeTensorMode())


def test_a_node_whose_spec_is_not_its_shape_is_named() -> None:
    program = analysed_pair()
    assert shapes_at(program, 7) == []
    graph, mapping = copy_graph(program.graph)
    wrong = mapping[node(program, "a")]
    update_info(wrong, spec=replace(tensor_spec(wrong), shape=(1, 9)))
    (problem,) = shapes_at(replace(program, graph=graph), 7)
    assert problem.endswith("a is (7, 6) at a batch of 7, not (7, 9)")


def test_a_node_that_does_not_run_is_named() -> None:
    program = analysed_pair()
    graph, mapping = copy_graph(program.graph)
    mapping[node(program, "b")].args = (mapping[node(program, "input_1")],)
    (problem,) = shapes_at(replace(program, graph=graph), 7)
    assert "b does not run at a batch of 7" in problem


def test_a_hook_sees_every_node_and_decides_its_value() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    seen: list[str] = []

    def hook(node: fx.Node, run: Any) -> Any:
        seen.append(node.name)
        return run() * 10 if node.name == "neg" else run()

    assert NodeRunner(nn.Module(), graph, hook).run_named({"x": torch.tensor(2)}).item() == -20
    assert seen == ["x", "neg", "output"]
