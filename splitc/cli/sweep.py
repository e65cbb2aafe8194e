"""Simulate a model over worlds, bandwidths and strategies: the throughput tables of `splitc simulate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, Program
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy
from splitc.report.what_if import simulated_figures, simulated_step
from splitc.runtime.transport.formats import AS_COMPUTED, Wire


@dataclass(frozen=True)
class Cell:
    """One strategy in one world at one bandwidth (bytes/s between hosts).

    step_seconds, samples_per_second: simulated.  estimate: samples/s by the planner's closed forms.  accumulate:
    batches to an update; seconds and bytes are of one batch.  sent_bytes: by the busiest rank.  roles: sizes of the
    roles, as "9 + 1".  why: the reason why there is no plan; the figures are 0 then.
    """

    strategy: str
    world: int
    bandwidth: float
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    estimate: float = 0.0
    global_batch: int = 0
    accumulate: int = 1
    sent_bytes: float = 0.0
    roles: str = ""
    why: str = ""


def sweep(
    program: Program,
    cluster: Cluster,
    worlds: Iterable[int],
    bandwidths: Iterable[float],
    strategies: Sequence[str],
    global_batch: int | None = None,
    accumulate: int = 1,
    wire: Wire = AS_COMPUTED,
) -> Iterator[Cell]:
    """A cell for every bandwidth, world and strategy, in that order, one after the other.

    program: analysed, not placed.  Raises CostError and PlacementError for an invalid cluster or strategy.
    """
    asked = [(text, parse_strategy(text)) for text in strategies]
    for bandwidth, world in [(bandwidth, world) for bandwidth in bandwidths for world in worlds]:
        at = cluster.with_bandwidth(bandwidth)
        for text, strategy in asked:
            try:
                placed = Place(at, world, strategy, global_batch=global_batch, wire=wire).run(program)
            except PlacementError as error:
                yield Cell(text, world, bandwidth, accumulate=accumulate, why=str(error))
                continue
            yield simulated(placed, at, Cell(text, world, bandwidth, accumulate=accumulate))


def simulated(program: PlacedProgram, cluster: Cluster, cell: Cell) -> Cell:
    """The cell with the figures of a placed program on `cluster`."""
    plan, step = program.plan, simulated_step(program, cluster, cell.accumulate)
    planned = replace(cell, estimate=plan.samples_per_second, global_batch=plan.global_batch, roles=sizes_text(plan))
    return replace(planned, **simulated_figures(plan, step))


def sizes_text(plan: Plan) -> str:
    """How many ranks each role has, where there are several: `9 + 1`."""
    by_roles = plan.ranks_by_roles.items()
    sizes = [len(ranks if roles[0] in plan.roles else plan.all_roles[roles[0]]) for roles, ranks in by_roles]
    return " + ".join(map(str, sizes)) if len(sizes) > 1 else ""
