"""A model that did not change is analysed once in a process, and validated once in all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc import analysis
from splitc.compiled import CompiledProgram

SCALE = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.held = nn.Linear(4, 8), nn.Linear(8, 5), None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x))) * SCALE


IMAGES, LABELS = torch.linspace(0, 1, 24).reshape(6, 4), torch.arange(6) % 5


def compiled(model: nn.Module, world: int = 2, strategy: str = "data_parallel") -> CompiledProgram:
    return splitc.compile(model, world, IMAGES, LABELS, F.cross_entropy, cluster="v100-10gbe", strategy=strategy)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of an analysis was run."""
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    names: list[str] = []

    def counting(name: str) -> Callable[..., object]:
        real = getattr(analysis, name)
        return lambda *args: names.append(name) or real(*args)

    for name in ("capture", "validate_capture"):
        monkeypatch.setattr(analysis, name, counting(name))
    return names


def test_another_strategy_or_world_of_the_same_model_analyses_nothing(calls: list[str]) -> None:
    net = Net()
    first = compiled(net)
    assert compiled(net, 3).plan.world == 3 and compiled(net, 2, "layer_separation").plan.strategy == "layer_separation"
    assert calls == ["capture", "validate_capture"]
    assert compiled(net).files == first.files and compiled(net).verify().holds


def test_a_second_model_of_the_same_code_is_captured_and_not_validated(calls: list[str]) -> None:
    first, second = compiled(Net()), compiled(Net())
    assert calls == ["capture", "validate_capture", "capture"]
    assert first.files == second.files and first.program.loss_terms == second.program.loss_terms != ()


@pytest.mark.parametrize(
    "change",
    [
        lambda net, patch: net.register_buffer("later", torch.zeros(1)),
        lambda net, patch: setattr(net, "held", 1),
        lambda net, patch: patch.setitem(globals(), "SCALE", 3.0),
        lambda net, patch: patch.setattr(Net, "forward", lambda self, x: self.head(self.body(x))),
        lambda net, patch: patch.setattr("splitc.ir.disk_cache._versions", lambda: "another version"),
        lambda net, patch: patch.setattr(net.body, "training", False),
    ],
    ids=["buffer", "attribute", "global", "code", "versions", "mode"],
)
def test_a_changed_model_is_analysed_and_validated_anew(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, pytest.MonkeyPatch], object]
) -> None:
    net = Net()
    compiled(net)
    change(net, monkeypatch)
    compiled(net)
    assert calls == ["capture", "validate_capture"] * 2


def test_a_model_without_a_digest_is_validated_every_time(calls: list[str]) -> None:
    net = Net()
    net.held = iter([])
    compiled(net)
    compiled(net)
    assert calls == ["capture", "validate_capture"] * 2
