"""The list of third-party models, and what is measured of one, on models of our own: no package is needed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real_models.case import Case, Entry
from benchmarks.real_models.measure import Result, measure
from benchmarks.real_models.table import page
from splitc.runtime.worker import Worker


class Net(nn.Module):
    """A convolution with BatchNorm, dropout, two linear layers."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 5)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        if self.wrong:
            x = x * float(x.sum())
        return self.fc2(self.drop(F.relu(self.fc1(x))))


def measured(entry: Entry) -> Result:
    written: list[Result] = []
    result = measure("net", entry, written.append)
    assert written[-1] is result
    return result


def net(n: int, wrong: bool = False) -> Case:
    return Case(Net(wrong), torch.randn(n, 3, 4, 4), torch.randint(5, (n,)), F.cross_entropy)


@pytest.mark.slow
def test_a_model_is_compiled_compared_with_eager_and_trained_under_three_strategies() -> None:
    result = measured(Entry("ours", net))
    assert (result.failed, result.captured, result.equal, result.trains) == ("", True, True, True), result.why
    assert [t.strategy for t in result.trained] == ["auto(2)", "layer_separation(3)", "modulo_shard(2)"]
    assert "captured 1 (100%), equal 1 (100%), trained 1 (100%)" in page([result], [])


@pytest.mark.slow
def test_a_step_that_differs_from_eager_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(self: Any) -> dict[str, Tensor]:
        return {name: 2 * gradient for name, gradient in gradients(self).items()}

    gradients = Worker.gradients
    monkeypatch.setattr(Worker, "gradients", forgotten)
    result = measured(Entry("ours", net))
    assert result.failed == "equal eager"
    assert "1.0e+00 at" in result.why


def test_the_stage_that_fails_and_its_error_are_in_the_page() -> None:
    def broken(n: int) -> Case:
        raise ValueError("no such width")

    result = measured(Entry("ours", broken, shows="widths"))
    assert result.failed == "build"
    assert "| net | build | ValueError: no such width (test_real_models.py:" in page([result], ["other"])
