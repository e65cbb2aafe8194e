"""Fill `plan.predicted`: what each rank does with the time of a step, by simulating the program that was made.

The planner's closed forms add up what a step computes and sends; the simulation knows what of it overlaps (design 7).
This pass decides nothing else: the plan stays the one that was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram


@dataclass(frozen=True)
class Predict(Pass[LoweredProgram, LoweredProgram]):
    """Simulate some steps on `cluster`; the last one is the prediction."""

    name: ClassVar[str] = "predict"
    requires: ClassVar[tuple[Check, ...]] = (actions_are_complete,)
    ensures: ClassVar[tuple[Check, ...]] = ()

    cluster: Cluster

    def run(self, program: LoweredProgram) -> LoweredProgram:
        plan, phases = program.plan, simulate(program, self.cluster).phases
        return replace(program, plan=plan.with_prediction(phases, self.cluster))
