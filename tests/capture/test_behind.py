"""A large capture is validated behind its plan: the thread says yes, or whoever waits validates it anew."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.capture.example.example import Example
from splitc.capture.validate import behind
from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.rank_memory import memory_of
from splitc.errors import CaptureError
from splitc.passes.analysis import analyse

CALLS: list[int] = []


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        return self.fc(x) * len(CALLS)


class Mixing(nn.Module):
    """Examples depend on each other where features are larger than random numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight.fill_(100.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.head(x + F.relu(x.abs() - 50).flip(0))


def images() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(), nn.Linear(8, 4))


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "_SMALL", 0)


def compiled(model: nn.Module, x: Tensor | None = None, strategy: str = "data_parallel") -> CompiledProgram:
    x = torch.randn(4, 4) if x is None else x
    program = splitc.compile(model, 2, x, torch.arange(4) % 4, F.cross_entropy, cluster="v100-10gbe", strategy=strategy)
    assert isinstance(program, CompiledProgram)
    return program


@pytest.mark.slow
def test_what_is_expected_is_what_validation_finds_and_the_process_stays_as_it_is() -> None:
    model, x, y = images(), torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    example, ahead = Example.bind(model, x, y, F.cross_entropy), behind.Behind()
    expected = analyse(model, example, behind=ahead)
    before = torch.get_rng_state()
    ahead.start()
    assert torch.get_default_dtype() is torch.float32
    assert ahead.wait() and torch.equal(before, torch.get_rng_state()), "drawn from the generator of the process"
    found = analyse(model, example)
    assert (expected.loss_terms, expected.coupled) == (found.loss_terms, found.coupled) and found.loss_terms


def test_a_plan_comes_before_the_refusal_and_nothing_is_written(tmp_path: Path) -> None:
    program = compiled(Counting())
    assert program.plan.world == 2 and program.report().splitlines()[-1] == program.verdict
    assert not program._behind or not program._behind.wait()
    assert program.verdict.startswith("Not validated yet")
    with pytest.raises(CaptureError, match="CALLS"):
        program.save(tmp_path / "build")
    assert not (tmp_path / "build").exists()


@pytest.mark.slow
def test_a_program_is_planned_anew_where_its_examples_couple_against_expectation() -> None:
    program = compiled(Mixing(), torch.rand(4, 4))
    assert not program.program.coupled
    program.validated()
    assert program.program.coupled and program.verdict.startswith("Validated")


@pytest.mark.slow
def test_measuring_memory_waits_for_a_validation_that_compares_bits() -> None:
    """It switches oneDNN off for the whole process; AlexNet's gradients differed while its report was made."""
    program, ahead, begun, seen = compiled(images(), torch.randn(4, 3, 8, 8)), behind.Behind(), Event(), list[bool]()
    program.validated()

    def check() -> None:
        begun.set()
        for _ in range(50):
            time.sleep(0.002)
            seen.append(bool(torch.backends.mkldnn.enabled))

    ahead.then(check)
    ahead.start()
    begun.wait()
    memory_of(program.program, 0)
    assert ahead.wait() and all(seen)


def test_a_validation_that_failed_stays_so() -> None:
    ahead = behind.Behind()
    ahead.then(lambda: 1 // 0)
    assert not ahead.wait()
    ahead.start()
    assert not ahead.wait()
