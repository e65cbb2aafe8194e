"""Fill `plan.prediction.phases`: how each rank spends the time of a step, by simulating the lowered program.

The planner's closed forms add up computation and communication; the simulation knows which of them overlap.  The plan
stays as it was chosen.  The report gets a note on what unlike devices may compute unlike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.cost_models.calibration.learning import basis, weights
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import base_digest, digest
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.prediction import Later, Prediction
from splitc.ir.program import LoweredProgram


@dataclass(frozen=True)
class Predict(Pass[LoweredProgram, LoweredProgram]):
    """Simulate some steps on `cluster`; the last one, or the mean of a round, is the prediction."""

    requires: ClassVar[tuple[Check, ...]] = (actions_are_complete,)

    cluster: Cluster

    def run(self, program: LoweredProgram) -> LoweredProgram:
        cluster, learned, numbers = self.cluster, self.cluster.learned, digest(self.cluster)
        timeline = simulate(program, cluster)
        prediction = program.plan.prediction
        if prediction.priced_on != numbers:  # a plan that nobody priced, or elsewhere
            prediction = Prediction(proof="heuristic", priced_on=numbers, tried=prediction.tried)
        ran = learned.ran.get(program.plan.hash, 0.0) if learned is not None else 0.0
        prediction = replace(
            prediction,
            phases=timeline.phases,
            p50=timeline.p50,
            p90=timeline.p90,
            cluster=cluster.name,
            based_on=base_digest(cluster),
            factors={} if learned is None else learned.factors,
            weights=Later(lambda: weights(program, cluster, timeline)),
            basis="measured" if ran else basis(program, cluster),
            ran=ran,
            spans=lambda: simulate(program, cluster, record=True).spans,
        )
        plan = replace(program.plan, prediction=prediction)
        return replace(program, plan=plan, notes=(*program.notes, *_may_drift(plan, self.cluster)))


def _may_drift(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """A note on layers whose gradients unlike devices compute by themselves, and have to compute alike."""
    own: dict[tuple[str, ...], list[str]] = {}
    for name, place in plan.placements.items():
        state = place.state or ("features" if place.split == "columns" else "replicate")
        if place.sync == "late_multiply" or (place.role in plan.groups and state == "replicate"):
            devices = dict.fromkeys(cluster.device_of(rank).name for rank in plan.roles[place.role])
            own.setdefault(tuple(devices), []).append(name)
    for unlike, names in own.items():
        if len(unlike) > 1:
            yield (
                f"{' and '.join(unlike)} compute the gradients of {', '.join(names)} by themselves, alike up to "
                f"rounding, so their parameters may drift apart; check_replicas=1000 of the worker finds it."
            )
