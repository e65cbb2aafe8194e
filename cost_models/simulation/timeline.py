"""Predict the timeline of a lowered program by simulating its ranks until they reach a steady state.

A rank may start its next step before others have finished theirs, so several steps are simulated and the first is left
out.  Where ranks train in rounds, the last step ends one, and the figures are the mean over a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from splitc.cost_models.simulation.events import Operation, Simulation
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import step_operations
from splitc.ir.cluster import Cluster
from splitc.ir.phases import Phases
from splitc.ir.program import LoweredProgram
from splitc.runtime.transport.phases import Span


@dataclass(frozen=True)
class Timeline:
    """A predicted step in the steady state, or the mean of a round.  step_seconds: its duration.

    phases: of each rank in the last step, or their mean.
    """

    step_seconds: float
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...] = ()


def simulate(
    program: LoweredProgram, cluster: Cluster, steps: int = 3, record: bool = False, optimizer_copies: int = 1
) -> Timeline:
    """Simulate `steps` steps of a lowered program, of rounds at least two unless each step ends one.

    `step_seconds` is the mean of all steps but the first, if any; with rounds that of the slowest rank's round.

    record: keep the span of every operation.  optimizer_copies: copies of the parameters in the optimizer state.
    """
    prices = Prices(program, cluster, optimizer_copies)
    ranks = range(program.plan.world)
    programs: list[list[Operation]] = [[] for _ in ranks]
    updates = program.plan.rounds.steps if program.plan.rounds else 0
    steps = max(steps, 2) if updates > 1 else steps
    for k in range(steps):
        prices.begin_step()
        for rank in ranks:
            programs[rank] += step_operations(prices, rank, updates == 1 or (updates > 1 and k == steps - 1))
    run = Simulation(programs, record, cluster.cores if cluster.ranks_share_device else None)
    if updates > 1:
        phases = _of_round([run.steps(rank)[-2:] for rank in ranks], updates)
        return Timeline(phases[0].step, phases, tuple(run.spans))
    ends = run.ends()
    settled = ends[0] if steps == 1 else (ends[-1] - ends[0]) / (steps - 1)
    return Timeline(settled, tuple(run.steps(rank)[-1] for rank in ranks), tuple(run.spans))


def _of_round(steps: Sequence[Sequence[Phases]], updates: int) -> tuple[Phases, ...]:
    """Return the mean phases of a round.  steps: for each rank, one within a round and one that ends it.

    The ranks end a round together: those that are faster wait for the slowest.
    """
    means = []
    for within, last in steps:
        numbers = zip(astuple(within)[1:], astuple(last)[1:], strict=True)
        means.append(Phases(within.rank, *(((updates - 1) * a + b) / updates for a, b in numbers)))
    slowest = max(mean.step for mean in means)
    return tuple(replace(mean, step=slowest, waiting=mean.waiting + slowest - mean.step) for mean in means)
