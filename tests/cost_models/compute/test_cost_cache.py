"""Counted costs on disk: equal to counted anew, and counted anew for any other graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.cost_models.compute import cost_cache
from splitc.cost_models.compute.cost_cache import cached_layer_costs, graph_text
from splitc.cost_models.compute.flops import layer_costs
from splitc.ir.costs import CostLine
from splitc.ir.program import Program


class Net(nn.Module):
    def __init__(self, stride: int = 1, dilation: int = 1, slope: float = 0.1) -> None:
        super().__init__()
        self.conv, self.slope = nn.Conv2d(3, 4, 3, stride=stride, padding=dilation, dilation=dilation), slope
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.leaky_relu(self.conv(x), self.slope).mean((2, 3)))


def captured(model: nn.Module, size: int = 8, batch: int = 4, dtype: torch.dtype = torch.float32) -> Program:
    images, labels = torch.randn(batch, 3, size, size, dtype=dtype), torch.randint(5, (batch,))
    return capture(model, Example.bind(model, images, labels, F.cross_entropy))


def channels_last(net: Net) -> Net:
    net.conv.weight.data = net.conv.weight.data.contiguous(memory_format=torch.channels_last)
    return net


def frozen(net: Net) -> Net:
    net.conv.requires_grad_(False)
    return net


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs whose layers were counted."""
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    names: list[str] = []

    def counting(program: Program) -> dict[str, CostLine]:
        names.append(program.name)
        return layer_costs(program)

    monkeypatch.setattr(cost_cache, "layer_costs", counting)
    return names


@pytest.mark.slow
def test_the_second_program_of_a_graph_reads_the_costs_of_the_first(counted: list[str]) -> None:
    first, second = cached_layer_costs(captured(Net())), cached_layer_costs(captured(Net()))
    assert counted == ["Net"] and first == second == layer_costs(captured(Net()))
    assert first["conv"].at(7) == second["conv"].at(7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        lambda: captured(Net(stride=2)),
        lambda: captured(Net(dilation=2)),
        lambda: captured(Net(slope=0.2)),
        lambda: captured(Net(), size=9),
        lambda: captured(Net(), batch=5),
        lambda: captured(frozen(Net())),
        lambda: captured(Net().double(), dtype=torch.float64),
        lambda: replace(captured(Net()), autocast=torch.bfloat16),
        lambda: captured(channels_last(Net())),
    ],
    ids=["stride", "dilation", "argument", "input", "batch", "frozen", "dtype", "autocast", "strides"],
)
def test_another_graph_is_counted_anew(counted: list[str], other: Callable[[], Program]) -> None:
    cached_layer_costs(captured(Net()))
    cached_layer_costs(other())
    assert len(counted) == 2


def test_a_function_that_a_name_does_not_tell_is_counted_every_time(counted: list[str]) -> None:
    program = captured(Net())
    call = next(node for node in program.graph.nodes if node.op == "call_function")
    real = call.target

    def mine(*args: object, **kwargs: object) -> object:
        return real(*args, **kwargs)

    call.target = mine
    assert graph_text(program) is None
    cached_layer_costs(program)
    cached_layer_costs(program)
    assert len(counted) == 2


def test_costs_of_other_layers_are_not_read(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_cache, "recall", lambda kind, key: {"conv": []})
    assert cached_layer_costs(captured(Net())) == layer_costs(captured(Net())) and counted == ["Net"]
