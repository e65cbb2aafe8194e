"""Measure the layers of small models, or pretend to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from splitc.cost_models.compute.flops import layer_costs
from splitc.cost_models.profiling import measured
from splitc.cost_models.profiling.measured import MeasuredLine, measure_layers
from splitc.ir.costs import Measured
from splitc.ir.program import Program
from tests.support.capturing import capture
from tests.support.models import CASES, Case

SHORT = 0.0
"""Seconds to measure for: two batches, and as few passes as there can be."""


def captured(case: Case | str, autocast: torch.dtype | None = None) -> Program:
    model, example, target, loss = (CASES[case] if isinstance(case, str) else case).make()
    return capture(model, example, target, loss, autocast=autocast)


def lines_of(program: Program, folder: Path, budget: float = SHORT) -> dict[str, MeasuredLine]:
    return measure_layers(program, layer_costs(program), folder, budget)


class Pretended:
    """A timer that does not run: a node takes `per_example * batch + fixed` seconds."""

    runs: list[int]

    def __init__(self, per_example: float = 1e-3, fixed: float = 1e-2, flop_rate: float = 1e9) -> None:
        self.runs, self._line, self._rate = [], (per_example, fixed), flop_rate

    def __call__(self, program: Program, root: nn.Module, where: torch.device) -> Pretended:
        self._nodes = [node.name for node in program.graph.nodes if node.op.startswith("call_")]
        return self

    def times(self, inputs: Mapping[str, Tensor], budget: float) -> dict[str, Measured]:
        batch = len(next(iter(inputs.values())))
        self.runs.append(batch)
        seconds = self._line[0] * batch + self._line[1]
        return dict.fromkeys(self._nodes, Measured(seconds, 2 * seconds, self._rate))


def pretend(monkeypatch: pytest.MonkeyPatch, *numbers: float) -> Pretended:
    """Let nothing run: the timer that is used instead."""
    bench = Pretended(*numbers)
    monkeypatch.setattr(measured, "NodeTimer", bench)
    return bench
