"""From a model, its loss and an example to a Program: inputs, specs, holdings, lines; training modes and hooks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tests.support.models
from splitc.capture.example.example import Example
from splitc.ir.graph import info, tensor_spec
from splitc.ir.program import SizeSpec, TensorSpec
from tests.support.capturing import capture, captured, node
from tests.support.models import CASES, CLASSES, Made, Recurrent, SmallVGG, images, labels, sequences, vectors
from tests.support.sampling import in_tiers


@pytest.mark.slow
@in_tiers("cases", CASES, one_in=12)
def test_the_graph_computes_the_models_loss_and_gradients_at_any_batch(cases: list[Any]) -> None:
    for name in cases:
        captured(*CASES[name].make())


@pytest.mark.slow
def test_specs_know_the_batch_dimension_of_every_value() -> None:
    program = capture(Recurrent(), sequences()(), labels()(), F.cross_entropy)
    specs: dict[str, Any] = {n.name: info(n).spec for n in program.graph.nodes}
    outputs, (hidden, cells) = specs["lstm"]
    assert outputs == TensorSpec((1, 6, 6), torch.float32, 0, True)
    assert hidden == cells == TensorSpec((2, 1, 6), torch.float32, 1, True)
    assert specs["target"] == TensorSpec((1,), torch.int64, 0)
    assert specs["cross_entropy"] == TensorSpec((), torch.float32, None, True)


@pytest.mark.slow
def test_specs_know_how_many_rows_an_example_has_and_what_is_a_size() -> None:
    program = capture(*CASES["language_model"].make())
    rows = tensor_spec(node(program, "view_6")) if "view_6" in {n.name for n in program.graph.nodes} else None
    flat = next(
        tensor_spec(n) for n in program.graph.nodes if isinstance(info(n).spec, TensorSpec) and tensor_spec(n).rows > 1
    )
    assert flat.shape == (6, 11) and flat.at(10) == (60, 11) and (rows is None or rows.rows == 6)
    sizes = [info(n).spec for n in program.graph.nodes if n.target == "size"]
    assert sizes and all(spec == SizeSpec(1) for spec in sizes)


def test_a_value_that_has_the_batch_twice_has_no_spec_and_its_gradient_is_not_lost() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        z = m.fc(x)
        return (z @ z.t()).sum(1, keepdim=True) + z

    program = capture(Made(run, fc=nn.Linear(8, CLASSES)), vectors()(), labels()(), F.cross_entropy)
    assert info(node(program, "matmul")).spec is None
    assert program.tensors["fc.weight"].requires_grad


def test_every_node_knows_the_users_line() -> None:
    program = capture(*CASES["resnet"].make())
    text, first = inspect.getsourcelines(tests.support.models.SmallResNet)
    (line,) = [first + k for k, row in enumerate(text) if "self.fc(x.reshape" in row]
    assert info(node(program, "fc")).source == f"models.py:{line}"
    block, start = inspect.getsourcelines(tests.support.models.Block)
    (shortcut,) = [start + k for k, row in enumerate(block) if "self.downsample(x)" in row]
    assert info(node(program, "layer2_downsample")).source == f"models.py:{shortcut}"
    assert info(program.loss).source == "loss"
    assert all(info(n).source for n in program.graph.nodes)


def test_inputs_are_the_examples_tensors_by_name_and_the_targets_after_them() -> None:
    program = capture(*CASES["branches"].make())
    assert [(i.name, i.spec.template(), i.target) for i in program.inputs] == [
        ("x", (-1, 8), False),
        ("y", (-1, 6), False),
        ("target", (-1,), True),
    ]


def test_positional_only_and_catch_all_keywords_are_taken() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor, /, **others: Tensor) -> Tensor:
            return self.fc(x + others["y"])

    assert list(Example.bind(Net(), (vectors()(),)).inputs) == ["x"]
    program = captured(KeywordsOnly(), {"x": vectors()(), "y": vectors()()}, labels()(), F.cross_entropy)
    assert [i.name for i in program.inputs] == ["x", "y", "target"]


class KeywordsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.fc(x + others["y"])


def test_a_tied_parameter_is_held_once_with_all_its_names() -> None:
    program = capture(*CASES["language_model"].make())
    assert program.tensors["wte.weight"].names == ("wte.weight", "lm_head.weight")
    assert "lm_head.weight" not in program.tensors
    assert not program.tensors["attn.bias"].persistent


def test_parameters_that_no_gradient_reaches_are_not_trained() -> None:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = m.a(x)
        return m.fc(hidden.detach()), m.unused(hidden)

    model = Made(run, a=nn.Linear(8, 8), fc=nn.Linear(8, CLASSES), unused=nn.Linear(8, 3), never=nn.Linear(8, 8))
    program = captured(model, vectors()(), labels()(), lambda out, y: F.cross_entropy(out[0], y))
    assert {h.name for h in program.tensors.values() if h.trainable} == {"fc.weight", "fc.bias"}
    assert set(program.tensors) == {"a.weight", "a.bias", "fc.weight", "fc.bias"}
    assert not tensor_spec(node(program, "a")).requires_grad


def test_running_statistics_are_kept_also_where_the_loss_does_not_use_the_value() -> None:
    model = Made(lambda m, x: (m.fc(x), m.aux(x)), fc=nn.Linear(8, CLASSES), aux=nn.BatchNorm1d(8))
    program = captured(model, vectors()(), labels()(), lambda out, y: F.cross_entropy(out[0], y))
    assert "aux.running_mean" in program.tensors and not program.tensors["aux.weight"].requires_grad


@pytest.mark.slow
def test_batchnorm_in_evaluation_mode_stays_so() -> None:
    model = SmallVGG()
    model(torch.randn(8, 3, 8, 8))
    model.features[1].eval()
    program = captured(model, images()(), labels()(), F.cross_entropy)
    names = {n.name: n for n in program.graph.nodes}
    assert names["features_1"].target is F.batch_norm and names["features_5"].op == "call_module"


@pytest.mark.slow
def test_a_model_in_evaluation_mode_is_captured_without_its_dropout() -> None:
    program = captured(SmallVGG().eval(), images()(), labels()(), F.cross_entropy)
    assert not any(n.op == "call_module" and n.target == "features.1" for n in program.graph.nodes)
    assert not any("dropout" in n.name for n in program.graph.nodes)


def test_forward_hooks_are_part_of_the_model_its_own_too() -> None:
    model: Any = Made(lambda m, x: m.fc(m.a(x)), a=nn.BatchNorm1d(8), fc=nn.Linear(8, CLASSES))
    model.a.register_forward_hook(lambda module, inputs, output: output * 2)
    model.fc.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model.register_forward_hook(lambda module, inputs, output: output * 3)
    captured(model, vectors()(), labels()(), F.cross_entropy)
