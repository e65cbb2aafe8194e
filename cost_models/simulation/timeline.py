"""Predict the timeline of a lowered program by simulating its ranks until they reach a steady state.

A rank may start its next step before others have finished theirs, so several steps are simulated and the first is left
out.  Where ranks train in rounds, so many rounds are simulated, and the figures are means over the last.

Where computing varies, a collective waits for the slowest of its ranks: the simulation is repeated with other draws,
the same for all plans, and the step is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from statistics import fmean, quantiles

from splitc.cost_models.simulation.alike import representatives
from splitc.cost_models.simulation.batches import batches_of_round
from splitc.cost_models.simulation.events import Simulation
from splitc.cost_models.simulation.noise import Noise
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.programs import operations_of
from splitc.ir.cluster import Cluster
from splitc.ir.program import LoweredProgram
from splitc.runtime.transport.phases import Phases, Span

SAMPLES = 8
"""Simulations of a step whose computing varies."""

_LARGE = 1_000  # ranks times layers, above which they would take too long


@dataclass(frozen=True)
class Timeline:
    """A predicted step in the steady state, or the mean of a round.  step_seconds: its duration.

    phases: of each rank in the last step, or their mean.  p50, p90: so long take half and nine tenths of the steps at
    most; 0 where nothing varies.
    """

    step_seconds: float
    phases: tuple[Phases, ...]
    spans: tuple[Span, ...] = ()
    p50: float = 0.0
    p90: float = 0.0


def simulate(
    program: LoweredProgram,
    cluster: Cluster,
    steps: int = 3,
    record: bool = False,
    accumulate: int | None = None,
    samples: int = SAMPLES,
) -> Timeline:
    """Simulate `steps` steps of a lowered program, or as many rounds.

    `step_seconds` is the mean of all but the first, if any.  Updates of a round with nothing between them are one
    step that takes as many times as long.

    record: keep the span of every operation.  samples: simulations where computing varies; 0: one, without that.
    accumulate: batches to an update, which exchange their gradients once; None: as planned; a step is one batch, and
    the phases are the mean of those of an update.
    """
    samples = 0 if record or not varies(cluster, program.plan.world, len(program.layers)) else samples
    cores = cluster.cores if cluster.ranks_share_device else None
    links = cluster.link, cluster.local_link, cluster.site_link, *(each.link for each in cluster.unlike)
    costs_processor = any(link.processor or link.message_processor for link in links if link is not None)
    alike = tuple(range(program.plan.world)) if record or samples else representatives(program.plan, cluster)
    units = len(alike) // len(set(alike))
    of_round = list(batches_of_round(program, accumulate or program.plan.accumulate))
    laps = 1 if program.plan.trains_in_units else steps  # what travels under a round belongs to another one
    merge = not (record or costs_processor or cores)
    programs = operations_of(Prices(program, cluster, alike), steps // laps * of_round, merge)
    marks, batches = len(of_round), sum(batch.times for batch in of_round)
    jitters = [cluster.device_of(rank).jitter for rank in range(program.plan.world)]
    several: list[Timeline] = []
    took: list[float] = []
    for sample in range(samples or 1):
        noise = [Noise(jitter, rank, sample) for rank, jitter in enumerate(jitters)] if samples else ()
        run = Simulation(programs, record, cores, laps, noise, units)
        ends = run.ends()
        took += [(b - a) / batches for a, b in pairwise(ends[marks - 1 :: marks])]
        settled = ends[-1] if steps == 1 else (ends[-1] - ends[marks - 1]) / (steps - 1)
        phases = {rank: _mean(run.steps(rank)[-marks:], batches) for rank in set(alike)}
        of_all = (replace(phases[first], rank=rank) for rank, first in enumerate(alike))
        several.append(Timeline(settled / batches, tuple(of_all), tuple(run.spans)))
    return _expected(several, sorted(took)) if len(took) > steps else several[0]


def varies(cluster: Cluster, world: int, layers: int) -> bool:
    """Whether steps of a program with so many layers vary, in a world where they can be simulated several times."""
    jitter = cluster.device.jitter or any(each.device.jitter for each in cluster.unlike)
    return bool(jitter) and world * layers <= _LARGE


def _expected(several: Sequence[Timeline], took: Sequence[float]) -> Timeline:
    """The mean of samples.  took: seconds of all their steps, the shortest first."""
    ranks = zip(*(each.phases for each in several), strict=True)
    phases = tuple(_mean(of_rank, len(several)) for of_rank in ranks)
    *_, p50, _, _, _, p90 = quantiles(took, n=10)[:9]
    return Timeline(fmean(each.step_seconds for each in several), phases, (), p50, p90)


def _mean(steps: Sequence[Phases], updates: int) -> Phases:
    """Return the mean phases of steps that stand for so many updates."""
    return Phases(steps[0].rank, *(sum(each) / updates for each in zip(*(astuple(s)[1:] for s in steps), strict=True)))
