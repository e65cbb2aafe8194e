"""A layer is a node that owns parameters, with the parameterless nodes that follow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.graph import info, tensors_of_node
from splitc.ir.program import Program
from tests.support.capturing import capture, node
from tests.support.compiled import compiled
from tests.support.models import CASES, CLASSES, Attention, Made, labels, tokens, vectors


def layers(program: Program) -> dict[str, tuple[str, ...]]:
    return {layer.name: layer.nodes for layer in program.layers}


def made(run: Any, **children: Any) -> Any:
    return Made(run, **children)


def captured_layers(model: nn.Module, example: Tensor, loss: Any = F.cross_entropy) -> dict[str, tuple[str, ...]]:
    return layers(capture(model, example, labels()(), loss))


def test_parameterless_nodes_join_the_layer_before_them_the_loss_the_last() -> None:
    assert layers(capture(*CASES["vgg"].make())) == {
        "features.0": ("features_0",),
        "features.1": ("features_1", "features_2", "features_3"),
        "features.4": ("features_4",),
        "features.5": ("features_5", "features_6", "features_7", "flatten"),
        "classifier.0": ("classifier_0", "classifier_1", "classifier_2"),
        "classifier.3": ("classifier_3", "classifier_4", "classifier_5"),
        "classifier.6": ("classifier_6", "cross_entropy"),
    }


@pytest.mark.slow
def test_layers_stand_in_the_order_of_the_graph_and_hold_every_node_once() -> None:
    for name in CASES:
        program = capture(*CASES[name].make())
        order = {n.name: i for i, n in enumerate(program.graph.nodes)}
        listed = [n for layer in program.layers for n in layer.nodes]
        inside = [n.name for n in program.graph.nodes if n.op not in ("placeholder", "output")]
        assert sorted(listed) == sorted(inside)
        assert all([order[n] for n in layer.nodes] == sorted(order[n] for n in layer.nodes) for layer in program.layers)
        assert {h for layer in program.layers for h in layer.tensors} == set(program.tensors)
        assert all(info(node(program, n)).layer == layer.name for layer in program.layers for n in layer.nodes)


def test_a_node_that_reads_two_layers_belongs_to_the_last_of_them() -> None:
    found = layers(capture(*CASES["resnet"].make()))
    assert "add" not in found["layer2.downsample"] and found["layer2.bn2"][-2:] != ()
    joined = next(
        name for name, nodes in found.items() if any(n.startswith("add") for n in nodes) and name.startswith("layer2")
    )
    assert joined == "layer2.bn2"


def test_a_module_that_runs_twice_is_two_layers_where_another_lies_between() -> None:
    model = made(lambda m, x: m.fc(m.a(m.b(m.a(x)))), a=nn.Linear(8, 8), b=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES))
    program = capture(model, vectors()(), labels()(), F.cross_entropy)
    assert [layer.name for layer in program.layers] == ["a", "b", "a#2", "fc"]
    assert program.layer("a").tensors == program.layer("a#2").tensors == ("a.weight", "a.bias")


def test_a_module_that_runs_twice_in_a_row_is_one_layer() -> None:
    model = made(lambda m, x: m.fc(m.a(torch.relu(m.a(x)))), a=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES))
    assert list(captured_layers(model, vectors()())) == ["a", "fc"]


def test_a_parameter_used_by_a_function_makes_a_layer_named_after_its_module() -> None:
    found = layers(capture(*CASES["functional"].make()))
    assert list(found) == ["weights", "scales", "head", "temperature"]
    assert found["weights"] == (
        "weights_0",
        "linear",
        "shift",
        "add",
        "tanh",
        "weights_1",
        "linear_1",
        "add_1",
        "tanh_1",
        "flip",
    )


@pytest.mark.slow
def test_a_tied_parameter_is_held_by_each_layer_that_uses_it() -> None:
    program = capture(*CASES["language_model"].make())
    assert "wte.weight" in program.layer("wte").tensors
    assert program.layer("lm_head").tensors == ("wte.weight",)
    assert tensors_of_node(program, node(program, "lm_head")) == ("wte.weight",)


def test_what_is_made_of_sizes_and_constants_can_be_computed_everywhere() -> None:
    model = made(
        lambda m, x: m.fc(m.attn(m.wte(x)).mean(1)),
        wte=nn.Embedding(11, 8),
        attn=Attention(8, 2, 16),
        fc=nn.Linear(8, CLASSES),
    )
    program = capture(model, tokens()(), labels()(), F.cross_entropy)
    everywhere = {n.name for n in program.graph.nodes if info(n).copied_to_each_stage}
    assert {"size", "attn_bias", "eq"} <= everywhere
    assert not everywhere & {"wte", "attn_c_attn", "attn_c_attn_weight", "cross_entropy", "x", "target"}


def penalised(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    hidden = m.a(x).relu()
    return m.fc(m.b(hidden).relu()), hidden.square().mean(), m.a.weight.square().sum()


def with_penalty(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + 0.1 * output[1]


def test_a_mean_of_early_values_is_taken_where_the_loss_is() -> None:
    def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return with_penalty(output, target) + output[2]

    model = made(penalised, a=nn.Linear(8, 8), b=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES))
    found = captured_layers(model, vectors()(), loss)
    assert {"relu", "square", "sum_1"} < {*found["a"]} and {"mean", "mul", "add"} < {*found["fc"]}


@pytest.mark.slow
def test_a_loss_with_a_penalty_of_early_values_trains_in_several_roles() -> None:
    model = made(penalised, a=nn.Linear(8, 8), b=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES))
    strategy = "layer_separation(ranks=1+1+1, microbatches=2)"
    assert compiled(model, vectors()(), labels()(), with_penalty, 3, strategy).verify(dtype=torch.float64).holds


def test_a_counter_belongs_to_the_module_that_counts() -> None:
    model = made(lambda m, x: m.fc(m.norm(m.a(x))), a=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), fc=nn.Linear(8, CLASSES))
    model.norm.register_forward_hook(lambda module, inputs, output: output)
    program = capture(model, vectors()(), labels()(), F.cross_entropy)
    counters = [n for n in program.graph.nodes if info(n).side_effect]
    assert [info(n).layer for n in counters] == ["norm"] and info(counters[0]).copied_to_each_stage


def test_a_buffer_that_is_made_of_a_parameter_cannot_be_copied_with_what_reads_it() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        m.mean.mul_(0.9).add_(0.1 * m.a.weight.detach().mean(0))
        return m.fc(m.a(x) * m.mean)

    model = made(run, a=nn.Linear(8, 8), mean=nn.Buffer(torch.ones(8)), fc=nn.Linear(8, CLASSES))
    program = capture(model, vectors()(), labels()(), F.cross_entropy)
    assert not any(info(n).copied_to_each_stage for n in program.graph.nodes if n.op == "get_attr")


def test_layers_without_anything_to_train_are_frozen() -> None:
    program = capture(*CASES["frozen_trunk"].make())
    assert program.frozen_layers == ("features.0", "features.1", "features.4", "features.5")
