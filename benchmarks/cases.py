"""What a campaign measures: models, their plans, and the seconds that the plans' steps are predicted to take."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.figures import Cell
from splitc.cli.model_file import load_model
from splitc.compiled import CompiledProgram
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, Program
from splitc.passes.analysis import analyse
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings, specialise

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


class Case:
    """A model, analysed when it is needed, once for all plans.

    name: of `MODELS`, or as `splitc compile` takes it.  sizes: of its example, in place of those there.
    """

    def __init__(self, name: str, sizes: str | None = None) -> None:
        path, usual = MODELS.get(name, (name, None))
        torch.manual_seed(0)
        self.file = load_model(str(path), sizes or usual)

    @cached_property
    def program(self) -> Program:
        file = self.file
        return analyse(file.model, file.example, name=file.name)

    def compile(
        self,
        cell: Cell,
        cluster: Cluster,
        plan: Plan | None = None,
        pins: Mapping[str, str | Placement] = MappingProxyType({}),
        global_batch: int | None = None,
    ) -> CompiledProgram:
        """The cell's plan on a cluster, or the one that was made for it before.  Raises SplitcError."""
        settings = Settings(cell.world, global_batch, cluster, parse_strategy(cell.strategy), pins)
        file = self.file
        placed = specialise(self.program, settings, plan)
        return CompiledProgram(placed, file.model, file.example, settings)


def predictions(program: LoweredProgram, cluster: Cluster) -> dict[str, float]:
    """Seconds of a step of a compiled program, by the keys of `figures.PREDICTIONS`."""
    prediction = program.plan.prediction
    return {"roofline": simulate(program, cluster).step_seconds, "closed": prediction.program_seconds}
