"""Predict the timeline of a lowered program by simulating its ranks until they reach a steady state.

A rank may start its next step before others have finished theirs, so several steps are simulated and the first is left
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitc.cost_models.simulation.events import Operation, Simulation
from splitc.cost_models.simulation.step_operations import Prices, step_operations
from splitc.ir.cluster import Cluster
from splitc.ir.phases import Phases
from splitc.ir.program import LoweredProgram
from splitc.runtime.transport.phases import Span


@dataclass(frozen=True)
class Timeline:
    """A predicted step in the steady state.  step_seconds: its duration.  phases: of each rank in the last step."""

    step_seconds: float
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...] = ()


def simulate(
    program: LoweredProgram, cluster: Cluster, steps: int = 3, record: bool = False, optimizer_copies: int = 1
) -> Timeline:
    """Simulate `steps` steps of a lowered program.  `step_seconds` is the mean of all steps but the first, if any.

    record: keep the span of every operation.  optimizer_copies: copies of the parameters in the optimizer state.
    """
    prices = Prices(program, cluster, optimizer_copies)
    ranks = range(program.plan.world)
    programs: list[list[Operation]] = [[] for _ in ranks]
    for _ in range(steps):
        prices.begin_step()
        for rank in ranks:
            programs[rank] += step_operations(prices, rank)
    run = Simulation(programs, record, cluster.cores if cluster.ranks_share_device else None)
    ends = run.ends()
    settled = ends[0] if steps == 1 else (ends[-1] - ends[0]) / (steps - 1)
    return Timeline(settled, tuple(run.steps(rank)[-1] for rank in ranks), tuple(run.spans))
