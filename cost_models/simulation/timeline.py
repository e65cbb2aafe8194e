"""Predict the timeline of a lowered program by simulating its ranks until they reach a steady state.

A rank may start its next step before others have finished theirs, so several steps are simulated and the first is left
out.  Where ranks train in rounds, so many rounds are simulated, and the figures are means over the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from splitc.cost_models.simulation.alike import representatives
from splitc.cost_models.simulation.batches import batches_of_round
from splitc.cost_models.simulation.events import Simulation
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.programs import Programs
from splitc.ir.cluster import Cluster
from splitc.ir.program import LoweredProgram
from splitc.runtime.transport.phases import Phases, Span


@dataclass(frozen=True)
class Timeline:
    """A predicted step in the steady state, or the mean of a round.  step_seconds: its duration.

    phases: of each rank in the last step, or their mean.
    """

    step_seconds: float
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...] = ()


def simulate(
    program: LoweredProgram, cluster: Cluster, steps: int = 3, record: bool = False, accumulate: int | None = None
) -> Timeline:
    """Simulate `steps` steps of a lowered program, or as many rounds.

    `step_seconds` is the mean of all but the first, if any.  Updates of a round with nothing between them are one
    step that takes as many times as long.

    record: keep the span of every operation.  accumulate: batches to an update, which exchange their gradients once;
    None: as planned; a step is one batch, and the phases are the mean of those of an update.
    """
    cores = cluster.cores if cluster.ranks_share_device else None
    links = cluster.link, cluster.local_link, *(each.link for each in cluster.unlike)
    costs_processor = any(link.processor for link in links if link is not None)
    alike = tuple(range(program.plan.world)) if record or cores else representatives(program.plan, cluster)
    programs = Programs(Prices(program, cluster, alike), merge=not (record or costs_processor or cores))
    of_round = list(batches_of_round(program, accumulate or program.plan.accumulate))
    laps = 1 if program.plan.trains_in_units else steps  # what travels under a round belongs to another one
    for batch in steps // laps * of_round:
        programs.add(batch)
    run = Simulation(programs.operations, record, cores, laps)
    ends, marks, batches = run.ends(), len(of_round), sum(batch.times for batch in of_round)
    settled = ends[-1] if steps == 1 else (ends[-1] - ends[marks - 1]) / (steps - 1)
    phases = {rank: _mean(run.steps(rank)[-marks:], batches) for rank in set(alike)}
    of_all = (replace(phases[first], rank=rank) for rank, first in enumerate(alike))
    return Timeline(settled / batches, tuple(of_all), tuple(run.spans))


def _mean(steps: Sequence[Phases], updates: int) -> Phases:
    """Return the mean phases of steps that stand for so many updates."""
    return Phases(steps[0].rank, *(sum(each) / updates for each in zip(*(astuple(s)[1:] for s in steps), strict=True)))
