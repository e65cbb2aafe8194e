"""`splitc simulate`: throughput over worlds and bandwidths, and the predicted timeline of one plan."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from splitc import units
from splitc.cli.files import check_writable, write_file
from splitc.cli.model_file import load_model
from splitc.cli.plan_file import read_plan_file
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate as simulate_timeline
from splitc.cost_models.simulation.trace import chrome_trace
from splitc.errors import LaunchError, PlacementError
from splitc.ir.cluster import Cluster
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, Program
from splitc.ir.short_wire import parse_wire, wire_text
from splitc.passes.analysis import analyse, fingerprint
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy
from splitc.passes.use_plan import UsePlan
from splitc.report.tables import table
from splitc.report.what_if import simulated_figures, simulated_step
from splitc.runtime.progress import Step
from splitc.runtime.transport.formats import AS_COMPUTED, Wire
from splitc.specialise import Settings, specialise

_MOST_WORLDS = 16  # of a range without a step
_PLAN = "plan"  # the column of the plan that was given
_SHOWN = 8  # reasons why there is no plan


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


def simulate(args: argparse.Namespace) -> int:
    """Print the tables of all models; 2 when no strategy has a plan anywhere."""
    plan = read_plan_file(Path(args.plan), args.world) if args.plan else None
    worlds = [plan.world] if plan else parse_worlds(args.world)
    asked = [plan and _PLAN, args.against, args.strategies or (None if plan else "data_parallel,layer_separation")]
    columns = list(dict.fromkeys(re.split(r",(?![^(]*\))", ",".join(filter(None, asked)))))
    strategies = columns[plan is not None :]
    for text in strategies:
        parse_strategy(text)
    wire = parse_wire(args.wire)
    cluster = load_cluster(args.cluster)
    bandwidths = parse_bandwidths(args.bandwidth) if args.bandwidth else [cluster.link.bandwidth]
    if cluster.world is not None and max(worlds) > cluster.world:
        raise LaunchError(f"--world goes to {max(worlds)}, but cluster {cluster.name} has {cluster.world} devices")
    _check_trace(args, worlds, bandwidths, columns)
    found: dict[str, list[Cell]] = {}
    for model in args.models:
        file = load_model(model, args.input)
        with Step(f"tracing {file.name}", args.quiet) as step:
            program = analyse(file.model, file.example, name=file.name, evaluation=False, now=step.doing(file.name))
        cells = sweep(program, cluster, worlds, bandwidths, strategies, args.global_batch, args.accumulate, wire)
        placed = [UsePlan(plan, fingerprint(program)).run(program)] if plan else []
        at = [(each, Cell(_PLAN, worlds[0], each, accumulate=args.accumulate)) for each in bandwidths]
        total = len(worlds) * len(bandwidths) * len(columns)
        with Step(f"simulating {file.name}, {total} plans", args.quiet):
            planned = [simulated(each, cluster.with_bandwidth(rate), cell) for each in placed for rate, cell in at]
            found[file.name] = [*planned, *cells]
        if not args.json:
            print(_head(program, cluster, args))
            print(tables(found[file.name], columns, args.against))
        if args.trace:
            settings = Settings(worlds[0], args.global_batch, strategy="auto" if plan else columns[0], wire=wire)
            _write_trace(args.trace, program, cluster.with_bandwidth(bandwidths[0]), settings, plan)
    if args.json:
        rows = {name: [asdict(cell) for cell in cells] for name, cells in found.items()}
        print(json.dumps({"schema": 1, "cluster": cluster.name, "against": args.against, "models": rows}, indent=1))
    return 0 if any(not cell.why for cells in found.values() for cell in cells) else 2


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


def _check_trace(
    args: argparse.Namespace, worlds: Sequence[int], bandwidths: Sequence[float], strategies: Sequence[str]
) -> None:
    """Raises LaunchError when --trace is given for more than one plan, or when its file cannot be written."""
    if not args.trace:
        return
    if max(len(args.models), len(worlds), len(bandwidths), len(strategies)) > 1:
        raise LaunchError(
            "--trace writes the timeline of one plan: give one model, one --world, one --bandwidth, one of "
            "--strategies and no --against"
        )
    check_writable("--trace", Path(args.trace))


def _write_trace(path: str, program: Program, cluster: Cluster, settings: Settings, given: Plan | None) -> None:
    placed = specialise(program, replace(settings, cluster=cluster), given)
    plan = placed.plan
    roles = {rank: " and ".join(plan.roles_of(rank)) for rank in range(plan.world)}
    trace = chrome_trace({"predicted": simulate_timeline(placed, cluster, record=True).spans}, roles)
    write_file("--trace", Path(path), json.dumps(trace))
    print(f"wrote {path}: three predicted {plan.cycle}s; open it in https://ui.perfetto.dev")


def _head(program: Program, cluster: Cluster, args: argparse.Namespace) -> str:
    batch = f"a global batch of {args.global_batch}" if args.global_batch else f"{program.batch} examples a reader"
    gain = f"; gain over {args.against}" if args.against else ""
    updates = f"; an update every {args.accumulate} batches" if args.accumulate > 1 else ""
    wire = f"; approximate, {wire_text(parse_wire(args.wire))} on the wire" if args.wire else ""
    return (
        f"{program.name}, {batch}, {cluster.device.name} of {cluster.name}; samples/s, simulated{gain}{updates}{wire}\n"
    )


def tables(cells: Iterable[Cell], strategies: Sequence[str], against: str | None) -> str:
    """A table for each bandwidth: a row per world, a column per strategy, with its gain over `against`."""
    by_place: dict[float, dict[int, dict[str, Cell]]] = {}
    for cell in cells:
        by_place.setdefault(cell.bandwidth, {}).setdefault(cell.world, {})[cell.strategy] = cell
    texts = [f"{units.bandwidth(rate)}\n{_table(of, strategies, against)}\n" for rate, of in by_place.items()]
    every = [cell for worlds in by_place.values() for row in worlds.values() for cell in row.values()]
    missing = dict.fromkeys(f"no {cell.strategy} at {cell.world}: {cell.why}" for cell in every if cell.why)
    more = [f"and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
    return "\n".join([*texts, *list(missing)[:_SHOWN], *more])


def _table(worlds: Mapping[int, Mapping[str, Cell]], strategies: Sequence[str], against: str | None) -> str:
    columns: list[tuple[str, list[str]]] = [("world", list(map(str, worlds)))]
    for strategy in strategies:
        cells = [row[strategy] for row in worlds.values()]
        columns.append((strategy, ["-" if cell.why else f"{cell.samples_per_second:,.0f}" for cell in cells]))
        if any(cell.roles for cell in cells):
            columns.append(("ranks", [cell.roles for cell in cells]))
        if any(cell.accumulate > 1 for cell in cells):
            columns.append(("sent a batch", [units.nbytes(cell.sent_bytes) for cell in cells]))
        if against not in (None, strategy):
            base = [row[against].samples_per_second for row in worlds.values()]
            columns.append(("gain", [_gain(cell, other) for cell, other in zip(cells, base, strict=True)]))
    headers, texts = zip(*columns, strict=True)
    return table("|".join(f"#{header}" for header in headers), [*zip(*texts, strict=True)])


def _gain(cell: Cell, base: float) -> str:
    return f"{cell.samples_per_second / base:.2f}" if base and not cell.why else "-"


def parse_worlds(text: str) -> list[int]:
    """`8`, `4,8,16`, `5:80:5`, or `5:80`, which is at most 16 worlds from 5 to 80.  Raises LaunchError."""
    worlds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9]\d{0,6})(?::([1-9]\d{0,6})(?::([1-9]\d{0,6}))?)?", part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise LaunchError(f"--world {text}: write 8, or 4,8,16, or 5:80 for 5 to 80, or 5:80:5 for every fifth")
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3]) if match[3] else -(-(last - first + 1) // _MOST_WORLDS)
        worlds += range(first, last + 1, step)
    return sorted(set(worlds))


_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidths(text: str) -> list[float]:
    """Convert `25g,40g,100m`, in bits per second, to bytes per second.  Raises LaunchError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d*)?)([kmgt])(?:bit)?(?:/s|ps)?", part.strip().lower())
        if match is None or not float(match[1]):
            raise LaunchError(f"--bandwidth {text}: write bits per second with a unit, as 25g or 100m,2.6g")
        found.append(float(match[1]) * _SCALES[match[2]] / 8)
    return found
