"""The predicted timeline of a rewritten program: its ranks' operations, simulated until they have settled.

A rank may be ahead of others, and begins its next step meanwhile: so some steps are simulated, and the last ones count.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitc.cost_models.simulation.events import Operation, Simulation
from splitc.cost_models.simulation.step_operations import Prices, step_operations
from splitc.ir.cluster import Cluster
from splitc.ir.phases import Phases, Span
from splitc.ir.program import Program


@dataclass(frozen=True)
class Timeline:
    """Predicted steps.  step_seconds: of one step in the steady state.  phases: of each rank in it."""

    step_seconds: float
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...] = ()


def simulate(
    program: Program, cluster: Cluster, steps: int = 3, record: bool = False, optimizer_copies: int = 1
) -> Timeline:
    """Simulate `steps` steps of a rewritten program; with one step its own time counts, else that of those after it.

    record: keep the spans of everything that happens.  optimizer_copies: of the parameters, in the optimizer's state.
    """
    prices = Prices(program, cluster, optimizer_copies)
    ranks = range(program.required_plan.world)
    programs: list[list[Operation]] = [[] for _ in ranks]
    for _ in range(steps):
        prices.begin_step()
        for rank in ranks:
            programs[rank] += step_operations(prices, rank)
    run = Simulation(programs, record, cluster.cores if cluster.ranks_share_device else None)
    ends = run.ends()
    settled = ends[0] if steps == 1 else (ends[-1] - ends[0]) / (steps - 1)
    return Timeline(settled, tuple(run.steps(rank)[-1] for rank in ranks), tuple(run.spans))


def rank_operations(program: Program, cluster: Cluster, rank: int, optimizer_copies: int = 1) -> list[Operation]:
    """What `rank` does in one step."""
    return step_operations(Prices(program, cluster, optimizer_copies), rank)
