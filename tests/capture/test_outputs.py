"""What capture takes for the model's output, beside its loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.program import Program, Refusal
from tests.support.compiled import analyse
from tests.support.models import CLASSES, labels, made, vectors

X, Y = vectors()(), labels()()


def outputs_of(run: Any, loss: Any = F.cross_entropy, **children: nn.Module) -> Program | Refusal:
    model = made(run, fc=nn.Linear(8, CLASSES), **children)
    return analyse(model, X, Y, loss).outputs


def targets(program: Program | Refusal) -> list[str]:
    """The operations of the outputs, and what is returned of them."""
    assert isinstance(program, Program), program
    return [str(getattr(node.target, "__name__", node.target)) for node in program.graph.nodes]


def test_the_loss_and_its_target_are_no_part_of_the_output() -> None:
    found = outputs_of(lambda m, x: m.fc(x))
    assert targets(found) == ["x", "fc", "returned", "output"]
    assert isinstance(found, Program) and [each.name for each in found.inputs] == ["x"]


def test_values_that_only_the_output_has_are_traced_too() -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["scores"], target)

    found = outputs_of(lambda m, x: {"scores": (s := m.fc(x)), "best": s.argmax(1), "n": 2, "name": "a"}, loss)
    assert targets(found) == ["x", "fc", "argmax", "returned", "output"]
    assert isinstance(found, Program)
    (marked,) = found.graph.output_node().all_input_nodes
    assert str(marked.args[0]) == "{'scores': fc, 'best': argmax, 'n': 2, 'name': 'a'}"


def test_what_depends_on_parameters_that_the_loss_does_not_reach_is_left_out() -> None:
    def loss(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target)

    found = outputs_of(lambda m, x: (m.fc(x), m.apart(x)), loss, apart=nn.Linear(8, 2))
    assert isinstance(found, Program)
    (marked,) = found.graph.output_node().all_input_nodes
    assert str(marked.args[0]) == "(fc, None)"


def test_without_an_output_for_each_example_there_is_a_reason() -> None:
    for run, text in [
        (lambda m, x: {"loss": m.fc(x).mean()}, "the model returns nothing but its loss"),
        (lambda m, x: {"loss": m.fc(x).square().mean(), "first": m.fc(x)[0:1] * x}, "takes particular examples"),
    ]:
        program = analyse(made(run, fc=nn.Linear(8, 8)), torch.randn(4, 8))
        assert isinstance(program.outputs, Refusal) and text in program.outputs.why
