"""What training knows of its plan, so that it can say how fast it should be, and which plan would be faster now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from splitc import units
from splitc.cost_models.calibration.learning import GROUPS, slowed
from splitc.cost_models.calibration.record import Seen, keep, run_of
from splitc.cost_models.simulation.timeline import simulate
from splitc.errors import SplitcError
from splitc.ir.autocast import under_autocast
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.program import LoweredProgram, Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy
from splitc.report.what_if import choice_text
from splitc.runtime.live import Cause, Expected

_GAIN = 1.05  # times as fast, from which another plan is worth a word


def expected(
    program: LoweredProgram, analysed: Callable[[], Program], place: Callable[[], Place], source: str | Path | None
) -> Expected:
    """What rank 0 expects of a compiled program.

    analysed: the program that plans are made of.  place: the pass that chose its plan.  source: of its cluster.
    """
    plan = program.plan

    def note(seconds: float) -> None:
        if plan.prediction.phases:
            keep(source, run_of(None, plan, Seen(seconds), program.name))

    def advise(cause: Cause) -> str:
        return faster_plan(program, analysed(), place(), cause)

    compute = [phases.compute for phases in plan.prediction.phases]
    return Expected(plan.step_seconds, compute, plan.period * plan.accumulate, advise, note)


def faster_plan(program: LoweredProgram, analysed: Program, place: Place, cause: Cause) -> str:
    """Which plan is faster on the cluster as it is seen, by how much; or that none is."""
    seen = as_seen(place.cluster, cause, place.world)
    try:
        with under_autocast(analysed.root, analysed.autocast):
            asked = replace(place, cluster=seen, strategy=parse_strategy("auto"), fits=None, time_limit=20.0)
            other = asked.run(analysed).plan
    except SplitcError as error:
        return f"no other plan was found for this: {str(error).splitlines()[0]}"
    now = program.plan.global_batch / simulate(program, seen).step_seconds
    if other.samples_per_second < _GAIN * now:
        return "no other plan would be faster by more than 5 %"
    return (
        f"another plan would be {other.samples_per_second / now:.2f} times as fast: {choice_text(other)}, "
        f"{units.seconds(other.step_seconds)} a step as things are; compile again to take it"
    )


def as_seen(cluster: Cluster, cause: Cause, world: int) -> Cluster:
    """The cluster with ranks that compute, or links that run, at other rates than before."""
    network = dict.fromkeys(GROUPS["network"], cause.transfers)
    if len(cause.ends) != 1:
        cluster = slowed(cluster, network)
    ranks = set(cause.computing) | ({*cause.ends} if len(cause.ends) == 1 else set())
    unlike = [replace(each, ranks=left) for each in cluster.unlike if (left := tuple(set(each.ranks) - ranks))]
    for rank in sorted(ranks):
        link = cluster.link_of(rank) if rank in cause.computing else slowed(cluster, network).link_of(rank)
        device = cluster.device_of(rank).slowed(cause.computing.get(rank, 1.0))
        unlike.append(Unlike((rank,), device, link))
    return replace(cluster, unlike=tuple(unlike))
