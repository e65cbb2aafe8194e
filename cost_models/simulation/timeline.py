"""Predict the timeline of a lowered program by simulating its ranks until they reach a steady state.

A rank may start its next step before others have finished theirs, so several steps are simulated and the first is left
out.  Where ranks train in rounds, so many rounds are simulated, and the figures are means over the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

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


def simulate(program: LoweredProgram, cluster: Cluster, steps: int = 3, record: bool = False) -> Timeline:
    """Simulate `steps` steps of a lowered program, or as many rounds.

    `step_seconds` is the mean of all but the first, if any.  Updates of a round with nothing between them are one
    step that takes as many times as long.

    record: keep the span of every operation.
    """
    prices = Prices(program, cluster)
    ranks, of_round = range(program.plan.world), list(_of_round(program))
    programs: list[list[Operation]] = [[] for _ in ranks]
    for update, times in steps * of_round:
        prices.begin_step(times)
        for rank in ranks:
            programs[rank] += step_operations(prices, rank, update)
    run = Simulation(programs, record, cluster.cores if cluster.ranks_share_device else None)
    ends, marks, updates = run.ends(), len(of_round), sum(times for _, times in of_round)
    settled = ends[-1] if steps == 1 else (ends[-1] - ends[marks - 1]) / (steps - 1)
    return Timeline(settled / updates, tuple(_mean(run.steps(r)[-marks:], updates) for r in ranks), tuple(run.spans))


def _of_round(program: LoweredProgram) -> Iterator[tuple[int, int]]:
    """Yield (number in the round, times) of its updates, which without rounds is one; 0: nothing follows on them."""
    steps = program.plan.rounds.steps if program.plan.rounds else 1
    turns = {action.update for part in program.rank_programs for action in part.actions if action.update is not None}
    for before, update in pairwise(sorted({0, *turns, steps})):
        if update - before > 1:
            yield 0, update - before - 1
        yield update, 1


def _mean(steps: Sequence[Phases], updates: int) -> Phases:
    """Return the mean phases of steps that stand for so many updates."""
    return Phases(steps[0].rank, *(sum(each) / updates for each in zip(*(astuple(s)[1:] for s in steps), strict=True)))
