"""What a campaign measures: models, their plans, and the seconds that the plans' steps are predicted to take."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.figures import Cell
from splitc.api import CompiledProgram, Settings, analyse, specialise
from splitc.cluster import Cluster
from splitc.model_file import load_model
from splitc.plan import Plan
from splitc.program import Program
from splitc.strategies import parse_strategy

_HERE = Path(__file__).resolve().parent / "models"
MODELS = {
    "alexnet": (_HERE / "alexnet_quarter.py", "256x3x64x64"),
    "vgg": (_HERE / "vgg_small.py", None),
    "mlp": (_HERE / "mlp_fat.py", None),
    "transformer": (_HERE / "transformer_small.py", None),
}
"""Name -> a model file, and the sizes of its example in place of the file's own.

A step of each computes for 0.1 to 0.2 s on one core of 2026, and has 9 to 18 MB of gradients.
"""


class Subject:
    """A model, analysed when it is needed, once for all plans.  name: of `MODELS`, or as `splitc compile` takes it."""

    def __init__(self, name: str) -> None:
        path, sizes = MODELS.get(name, (name, None))
        torch.manual_seed(0)
        self.file = load_model(str(path), sizes)

    @cached_property
    def program(self) -> Program:
        file = self.file
        return analyse(file.model, file.example, file.target, file.loss, name=file.name)

    def compile(self, cell: Cell, cluster: Cluster, plan: Plan | None = None) -> CompiledProgram:
        """The cell's plan on a cluster, or the one that was made for it before.  Raises SplitcError."""
        settings = Settings(cell.world, cluster=cluster, strategy=parse_strategy(cell.strategy))
        file = self.file
        placed = specialise(self.program, settings, plan)
        return CompiledProgram(placed, file.model, file.loss, file.example, file.target, settings)


def predictions(program: Program, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step, by the keys of `figures.PREDICTIONS`."""
    found = {"roofline": simulated(program, cluster)}
    found["closed"] = program.required_plan.step_seconds
    return found


def simulated(program: Program, cluster: Cluster) -> float:
    """Seconds of a step by the event simulation; by the planner's sum in a splitc without one."""
    if importlib.util.find_spec("cost_models.timeline") is None:
        return program.required_plan.step_seconds
    timeline = importlib.import_module("cost_models.timeline").simulate(program, cluster)
    return float(timeline.step_seconds)
