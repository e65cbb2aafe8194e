"""What was traced trains on ranks as the model does in one process: every kind of model, every kind of loss term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from tests.support.compiled import class_batch, compiled
from tests.support.models import CASES, CLASSES, Case, Made, labels, tokens, vectors
from tests.support.sampling import sampled


class OddNames(nn.Module):
    """Names that nn.ModuleDict and Python keep for themselves, and a buffer that is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.keys: Any = nn.Module()
        self.keys.values = nn.Linear(8, CLASSES)
        self.register_buffer("shift", torch.randn(CLASSES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.keys.values(F.linear(x, self.weight)) + self.shift


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    y += 1
    with torch.no_grad():
        scale = y.abs().mean(1, keepdim=True)
    return torch.relu_(y) / (1 + scale)


def bag(m: Any, ids: Tensor) -> Tensor:
    return m.fc(m.table(ids))


KINDS = {
    **CASES,
    "odd_names": Case(OddNames, vectors(), labels(), F.cross_entropy),
    "in_place": Case(lambda: Made(in_place, fc=nn.Linear(8, CLASSES)), vectors(), labels(), F.cross_entropy),
    "bag": Case(
        lambda: Made(bag, table=nn.EmbeddingBag(11, 8, mode="sum"), fc=nn.Linear(8, CLASSES)),
        tokens(),
        labels(),
        F.cross_entropy,
    ),
}


@sampled("name", KINDS, everyday=["bag"])
def test_what_was_captured_trains_as_the_model_does_on_ranks(name: str) -> None:
    result = compiled(*KINDS[name].make(torch.float64), 3, "data_parallel", global_batch=7).verify(steps=2)
    assert result.holds, str(result)


def masked(out: Tensor, target: Tensor) -> Tensor:
    keep = target != 3
    return (F.cross_entropy(out, target, reduction="none") * keep).sum() / keep.sum().clamp(min=1)


def of_every_kind(out: Tensor, y: Tensor) -> Tensor:
    weighted = F.cross_entropy(out, y, ignore_index=0) + 0.1 * masked(out, y)
    return weighted + out.pow(2).mean() / 3 - out.sum() * 1e-2 + out.new_ones(())


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weighted": nn.CrossEntropyLoss(torch.linspace(0.5, 2, CLASSES), ignore_index=3, label_smoothing=0.1),
    "mean": lambda o, t: F.mse_loss(o, F.one_hot(t, CLASSES).to(o.dtype)),
    "sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "masked": masked,
    "of_every_kind": of_every_kind,
    "scaled by itself": lambda o, t: F.cross_entropy(o, t) * torch.exp(-F.cross_entropy(o, t).detach()),
    "scaled by a weighted mean": lambda o, t: o.pow(2).mean() / F.cross_entropy(o, t, ignore_index=3).detach().sqrt(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_every_kind_of_loss_trains_alike_on_unequal_ranks(name: str) -> None:
    loss = LOSSES[name]
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    model, x = nn.Linear(8, CLASSES).double(), torch.randn(7, 8, dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 3, 0, 4, 1])
    result = compiled(model, x, target, loss, 3, "data_parallel", global_batch=10).verify(steps=2)
    assert result.holds, str(result)


def test_a_class_or_a_function_stands_for_the_model_it_gives() -> None:
    x, y = class_batch((4, 8), CLASSES)
    program = splitc.compile(OddNames, 2, x, y, F.cross_entropy, strategy="data_parallel", cluster="v100-10gbe")
    assert isinstance(program, CompiledProgram) and program.program.name == "OddNames"
