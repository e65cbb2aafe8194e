"""Inputs that are dicts, lists or objects of tensors, and outputs that hold a loss among other things."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.errors import LaunchError
from splitc.runtime.worker import Worker
from tests.support.capturing import captured
from tests.support.compiled import compiled
from tests.support.ranks import on_workers
from tests.support.sampling import sampled


@dataclass
class Batch:
    """A batch as a model's own class."""

    image: Tensor
    extra: list[Tensor | None]
    scale: float = 2.0


@dataclass
class Output:
    """What a transformer returns."""

    loss: Tensor | None
    logits: Tensor


class Net(nn.Module):
    """Takes a dataclass, an optional argument and labels; returns an object with a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, batch: Batch, mask: Tensor | None = None, labels: dict[str, Tensor] | None = None) -> Output:
        extra = [each for each in batch.extra if each is not None]
        hidden = torch.relu(self.first(batch.image + extra[0])) * batch.scale
        logits = self.second(hidden if mask is None else hidden * mask)
        return Output(None if labels is None else F.cross_entropy(logits, labels["class"]), logits)


def nested(rows: int = 4) -> tuple[Batch, None, dict[str, Tensor]]:
    return Batch(torch.randn(rows, 6), [None, torch.randn(rows, 6)]), None, {"class": torch.randint(0, 5, (rows,))}


def test_tensors_in_nested_inputs_have_legal_names_and_paths() -> None:
    bound = Example.bind(Net(), nested())
    assert list(bound.tensors) == ["batch_image", "batch_extra_1", "labels_class"]
    assert bound.paths["batch_extra_1"] == ("batch", "extra", "1")
    odd = Example.bind(Odd(), ({"a b": torch.ones(2), "a-b": torch.ones(2)}, torch.ones(2)))
    assert list(odd.tensors) == ["x_a_b_0", "x_a_b_1", "x_a_b"]


class Odd(nn.Module):
    def forward(self, x: dict[str, Tensor], x_a_b: Tensor) -> Tensor:
        raise NotImplementedError


@pytest.mark.slow
@sampled("strategy", ["layer_separation", "hybrid_single"], one_in=2)
def test_nested_inputs_train_as_in_one_process(strategy: str) -> None:
    assert compiled(Net(), nested(), None, None, 2, strategy).verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_a_step_takes_the_nested_batch_by_position_or_name_or_its_tensors() -> None:
    torch.manual_seed(0)
    model, batch = Net(), nested(8)
    program = compiled(copy.deepcopy(model), nested(), None, None, 2, "data_parallel")
    expected = float(model(*batch).loss.detach())

    def run(worker: Worker) -> list[float]:
        own = slice(4 * (worker.data_rank or 0), 4 * (worker.data_rank or 0) + 4)
        extra = batch[0].extra[1]
        assert extra is not None
        mine = Batch(batch[0].image[own], [None, extra[own]])
        labels = {"class": batch[2]["class"][own], "unused": 3}
        given: list[tuple[Any, ...]] = [
            (mine, None, labels),
            ({"labels": labels, "batch": mine},),
            (mine, {"labels": labels}),
            (mine.image, extra[own], labels["class"]),
        ]
        with pytest.raises(LaunchError, match=r"the batch has no tensor labels\.class; give it as the example was"):
            worker.evaluate(mine, None, {"classes": labels["class"]})
        return [float(worker.evaluate(*each)) for each in given]

    for losses in on_workers(program, run, optimizer=lambda params: torch.optim.SGD([p for _, p in params], 0.1)):
        assert losses == pytest.approx([expected] * 4, rel=1e-5)


def test_arguments_of_any_number_are_inputs_of_their_own() -> None:
    class Varied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 5)

        def forward(self, *tensors: Tensor, scale: float = 1.0) -> Tensor:
            return self.fc(torch.stack(tensors).sum(0)) * scale

    program = captured(Varied(), (torch.randn(4, 6), torch.randn(4, 6)), torch.randint(0, 5, (4,)), F.cross_entropy)
    assert [i.name for i in program.inputs] == ["tensors_0", "tensors_1", "target"]


Returned = Callable[[Tensor, Tensor], Any]

RETURNED: dict[str, Returned] = {
    "loss and logits": lambda loss, logits: (loss, logits),
    "logits and loss": lambda loss, logits: [logits, loss],
    "a dict": lambda loss, logits: {"logits": logits, "cost": loss, "name": "x"},
    "a dict with several": lambda loss, logits: {"logits": logits, "loss": loss, "metric": logits.sum()},
    "loss and accuracy": lambda loss, logits: (loss, (logits.argmax(1) == 0).float().mean(), 0.5),
    "an object": lambda loss, logits: Output(loss, logits),
}


class Returning(nn.Module):
    def __init__(self, returned: Returned) -> None:
        super().__init__()
        self.fc, self.out, self.returned = nn.Linear(6, 8), nn.Linear(8, 5), returned

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.out(self.fc(x).relu())
        return self.returned(F.cross_entropy(logits, labels), logits)


@pytest.mark.slow
def test_the_loss_is_found_in_what_the_model_returns() -> None:
    for name in RETURNED:
        program = captured(Returning(RETURNED[name]), (torch.randn(4, 6), torch.randint(0, 5, (4,))))
        assert program.loss.name == "cross_entropy" and program.notes == (), name


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"hidden": (hidden := self.first(x).relu()), "logits": self.second(hidden)}


def parts_of_loss(output: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    return {"fit": F.cross_entropy(output["logits"], target), "size": output["logits"].pow(2).mean() * 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "data_parallel"])
def test_a_dict_of_losses_of_a_dict_is_summed_and_told(strategy: str) -> None:
    program = compiled(Losses(), torch.randn(4, 6), torch.randint(0, 5, (4,)), parts_of_loss, 2, strategy)
    assert "The loss is the sum of fit, size." in program.report()
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", "layer_separation"])
def test_several_losses_are_summed_with_the_tensors_of_their_modules(strategy: str) -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.rand(5))
    losses = [weighted, lambda output, target: output.pow(2).mean()]
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    program = compiled(model, torch.randn(4, 6), torch.randint(0, 5, (4,)), losses, 2, strategy)
    assert "The loss is the sum of loss0, loss1." in program.report()
    assert program.verify(dtype=torch.float64).holds
