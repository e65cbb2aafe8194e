"""Fill `plan.prediction.phases`: how each rank spends the time of a step, by simulating the lowered program.

The planner's closed forms add up computation and communication; the simulation knows which of them overlap.  The plan
stays as it was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import digest
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.prediction import Prediction
from splitc.ir.program import LoweredProgram


@dataclass(frozen=True)
class Predict(Pass[LoweredProgram, LoweredProgram]):
    """Simulate some steps on `cluster`; the last one, or the mean of a round, is the prediction."""

    requires: ClassVar[tuple[Check, ...]] = (actions_are_complete,)

    cluster: Cluster

    def run(self, program: LoweredProgram) -> LoweredProgram:
        phases = simulate(program, self.cluster).phases
        prediction = program.plan.prediction
        if prediction.cluster != self.cluster.name:  # a plan that nobody priced, or elsewhere
            prediction = Prediction(self.cluster.name, proof="heuristic")
        prediction = replace(prediction, phases=phases, priced_on=digest(self.cluster))
        return replace(program, plan=replace(program.plan, prediction=prediction))
