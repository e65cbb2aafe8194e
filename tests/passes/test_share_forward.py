"""One forward trains, evaluates and predicts: it ends where the model does."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from splitc.codegen.stage_names import method_name
from splitc.compiled import CompiledProgram
from splitc.ir.program import LoweredProgram
from splitc.ir.stage_parts import EVALUATING, PREDICTING, Part
from tests.support.compiled import compiled
from tests.support.models import CLASSES, labels, made, vectors


def program_of(run: Any, strategy: str = "data_parallel", loss: Any = F.cross_entropy, **children: nn.Module) -> Any:
    model = made(run, fc=nn.Linear(8, CLASSES), **children)
    return compiled(model, vectors()(), labels()(), loss, 2, strategy)


def after(program: CompiledProgram) -> tuple[list[str], list[str]]:
    """What training and outputs compute after the forward."""
    outputs = program.program.predicted
    assert isinstance(outputs, LoweredProgram)
    both = program.program.stages[-1], outputs.stages[len(program.program.stages) - 1]
    assert both[0].mode == both[1].mode
    return list(both[0].after), list(both[1].after)


def modes(program: CompiledProgram) -> list[str]:
    outputs = program.program.predicted
    assert isinstance(outputs, LoweredProgram)
    return [stage.mode for stage in outputs.stages]


def text(program: CompiledProgram) -> str:
    return "\n".join(program.files.values())


def test_the_loss_is_computed_of_what_forward_returns() -> None:
    program = program_of(lambda m, x: m.fc(x))
    assert after(program) == (["cross_entropy", "loss"], [])
    assert "stage.loss(comm, stage(comm, x), target, cross_entropy_weight)" in text(program)
    assert "cross_entropy_weight = stage.weigh(comm, target)" in text(program)


def test_what_outputs_alone_need_comes_after_it_too() -> None:
    program = program_of(
        lambda m, x: {"scores": m.fc(x), "odds": m.fc(x).softmax(1)}, loss=lambda y, t: F.cross_entropy(y["scores"], t)
    )
    trained, predicted = after(program)
    assert "softmax" in predicted and "softmax" not in trained
    assert "stage.output(comm, " in text(program)


def test_a_stage_that_interleaves_both_has_a_forward_of_its_own_for_outputs() -> None:
    def run(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        first = model.fc(x)
        penalty = first.square().mean()
        return penalty, model.fc2(first)

    program = program_of(run, loss=lambda y, t: F.cross_entropy(y[1], t) + y[0], fc2=nn.Linear(CLASSES, CLASSES))
    assert PREDICTING in modes(program) and "forward_predicting" in text(program)


def test_an_evaluation_of_its_own_has_methods_of_its_own_where_it_differs() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        scores: Tensor = model.fc(x)
        return scores if model.training else scores * 2

    program = program_of(run)
    assert EVALUATING in modes(program)
    assert "def loss_evaluating(" in text(program) and "forward_predicting" not in text(program)


def test_a_method_has_another_name_than_what_the_model_holds() -> None:
    program = program_of(lambda m, x: m.output(m.fc(x)), output=nn.Linear(CLASSES, CLASSES)).program
    names = [method_name(program, program.stages[0], True, part) for part in (Part.FORWARD, Part.LOSS, Part.OUTPUT)]
    assert names == ["forward", "loss", "output_"]
