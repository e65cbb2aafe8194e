"""Is what `auto` chooses the fastest of its plans in reality?  Plans measured on a testbed: models x ranks x rates.

    python -m benchmarks.regret                                    the cells that regret.json has not
    python -m benchmarks.regret --cells mlp@4@230Mbit              some of them
    python -m benchmarks.regret --table --markdown table.md        what was measured

Ranks are launched and calibrated once for each place.  Plans that `auto` simulated in a cell, the best of each strategy
first, then the fastest, are measured once.  Then auto's and the best few of that set are measured again and again, in
an order drawn anew, and only these runs count:

    regret    samples/s of the plan with the best median, by those of auto's plan, less 1
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.campaign import rates_of
from benchmarks.cases import Case
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Cell
from benchmarks.machine import machine
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc.cli.options import positive
from splitc.compiled import Settings as Compiled
from splitc.errors import SplitcError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster
from splitc.ir.plan import Plan

CELLS = [
    Cell(model, "auto", world, rate)
    for world, rate in ((4, "230Mbit"), (4, "100Mbit"), (8, "100Mbit"))
    for model in ("alexnet", "mlp", "transformer", "vgg")
]
TRIES = 2  # runs in place of one that other processes disturbed
LONG = 1.0  # seconds of a simulated step from which a run has one step, not two

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """plans: of a cell in the first set, at most.  best, rounds: of the second.  cpus, budget: as for `Campaign`."""

    plans: int = 12
    best: int = 4
    rounds: int = 5
    cpus: float = 2.0
    budget: float = 20.0
    foreign: float = 0.05


@dataclass(frozen=True)
class Measured:
    """A plan of a cell.  predicted: simulated seconds of a step; first, again: measured ones, of the two sets."""

    strategy: str
    plan: str
    chosen: bool
    samples: int
    predicted: float
    first: float = 0.0
    again: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Samples/s: the median of the second set."""
        return self.samples / statistics.median(self.again)

    @property
    def name(self) -> str:
        """`late_multiply`, `layer_separation 3 + 1, 4 microbatches`."""
        plan = Plan.from_json(self.plan)
        sizes = " + ".join(str(len(ranks)) for ranks in dict.fromkeys(plan.roles.values()))
        pieces = f", {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        return self.strategy + f" {sizes}" * ("+" in sizes) + pieces


def report(found: Mapping[Cell, Sequence[Measured]]) -> str:
    """A row for each cell, and the median and the worst regret."""
    rows, regrets, errors = [], [], []
    for cell, plans in found.items():
        (auto,) = (each for each in plans if each.chosen)
        best = max((each for each in plans if each.again), key=lambda each: each.rate)
        regrets.append(best.rate / auto.rate - 1)
        errors += [each.predicted / (each.first or each.predicted) - 1 for each in plans]
        error = f"{auto.predicted / statistics.median(auto.again) - 1:+.1%}"
        what = (cell.model, cell.world, cell.rate, len(plans), auto.name, f"{auto.rate:.0f}", error)
        rows.append((*what, "the same" if best is auto else best.name, f"{best.rate:.0f}", f"{regrets[-1]:.1%}"))
    if not rows:
        return "nothing was measured"
    heads = ("model", "ranks", "rate", "plans", "auto", "samples/s", "simulated", "best", "samples/s", "regret")
    sizes = [abs(each) for each in errors]
    return (
        f"{tabulate(rows, heads, tablefmt='pipe', disable_numparse=True)}\n\n"
        f"regret: median {statistics.median(regrets):.1%}, worst {max(regrets):.1%} of {len(regrets)} cells; simulated "
        f"steps of all plans of the first set: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"
    )


class File:
    """What was measured, in a file that is written after each cell.  Raises BenchmarkError when it is another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.about: dict[str, str] = {}
        self.cells: dict[Cell, tuple[Measured, ...]] = {}
        self.clusters: dict[str, str] = {}
        if not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            self.about, self.clusters = data["about"], data["clusters"]
            for each in data["cells"]:
                plans = (Measured(**{**plan, "again": tuple(plan["again"])}) for plan in each["plans"])
                self.cells[Cell(**each["cell"])] = tuple(plans)
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"{path} holds no figures of benchmarks.regret: {error!r}") from error

    def put(self, cell: Cell, plans: Iterable[Measured]) -> None:
        self.cells[cell] = tuple(plans)
        cells = [{"cell": asdict(cell), "plans": [asdict(each) for each in all]} for cell, all in self.cells.items()]
        text = json.dumps({"about": self.about, "clusters": self.clusters, "cells": cells})
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(self._path)


def plans_of(case: Case, cell: Cell, cluster: Cluster, most: int) -> list[Measured]:
    """Plans that auto simulated, distinct: its own, the best of each strategy, and the fastest of the others."""
    place = Compiled(cell.world, None, cluster, "auto").place()
    chosen = place.run(case.program).plan
    ranked = sorted((each for each in place.simulated(case.program)), key=lambda each: -each.samples_per_second)
    firsts = {each.strategy: each for each in reversed(ranked)}.values()
    found: dict[str, Measured] = {}
    for each in (None, *firsts, *ranked):
        plan = chosen if each is None or each.plan is None else each.plan
        seconds = plan.step_seconds if each is None else each.seconds
        decision = replace(plan, strategy="", model="").hash
        found.setdefault(decision, Measured(plan.strategy, plan.to_json(), each is None, plan.global_batch, seconds))
    return list(found.values())[:most]


class Regret:
    """Measures cells of one place after the other."""

    def __init__(self, settings: Settings, file: File, say: Say) -> None:
        self._settings, self._file, self._say = settings, file, say
        self._cases: dict[str, Case] = {}

    def run(self, cells: Iterable[Cell]) -> None:
        """Raises BenchmarkError when there can be no testbed, or a rank fails."""
        cells = list(cells)
        for name in dict.fromkeys(cell.model for cell in cells):
            self._cases[name] = Case(name)
            self._say(f"{name}: {len(self._cases[name].program.layers)} layers")
        for world in dict.fromkeys(cell.world for cell in cells):
            share = self._settings.cpus / world
            with NetworkTestbed(world, cpus=share) as testbed, Session(testbed) as session:
                for cell in (each for each in cells if each.world == world):
                    begin = time.monotonic()
                    self._cell(session, cell)
                    self._say(f"{cell}: {time.monotonic() - begin:.0f} s")

    def _cluster(self, session: Session, cell: Cell) -> Cluster:
        key = f"{cell.world} {cell.rate}"
        if key not in self._file.clusters:
            self._say(f"{cell.world} ranks, {cell.rate}: calibrating")
            self._file.clusters[key], _ = session.calibrate(self._settings.budget)
        return parse_cluster(self._file.clusters[key], key)

    def _cell(self, session: Session, cell: Cell) -> None:
        session.testbed.set_rate(rates_of(cell.rate))
        cluster, case = self._cluster(session, cell), self._cases[cell.model]
        plans = plans_of(case, cell, cluster, self._settings.plans)
        with tempfile.TemporaryDirectory(prefix="regret-") as builds:
            folders = []
            for k, each in enumerate(plans):
                compiled = case.compile(cell, cluster, Plan.from_json(each.plan))
                folders.append(compiled.save(Path(builds) / f"plan{k}"))
            for k, each in enumerate(plans):
                session.load(f"plan{k}", folders[k])
                plans[k] = replace(each, first=self._seconds(session, k, each))
                session.unload(f"plan{k}")
                self._say(f"{cell}: {each.name}: {plans[k].first:.3f} s, simulated {each.predicted:.3f} s")
            by_rate = sorted(range(1, len(plans)), key=lambda k: plans[k].first / plans[k].samples)
            again = [0, *by_rate[: self._settings.best]]
            for k in again:
                session.load(f"plan{k}", folders[k])
            for turn in range(self._settings.rounds):
                for k in random.Random(f"{cell} {turn}").sample(again, len(again)):
                    plans[k] = replace(plans[k], again=(*plans[k].again, self._seconds(session, k, plans[k])))
            for k in again:
                session.unload(f"plan{k}")
        self._file.put(cell, plans)

    def _seconds(self, session: Session, k: int, plan: Measured) -> float:
        """Of a step, in a run that other processes left alone, or the one that they disturbed the least."""
        found: list[tuple[float, float]] = []
        while not found or (found[-1][0] > self._settings.foreign and len(found) < TRIES):
            run = session.run(f"plan{k}", 1 if plan.predicted > LONG else 2, 1)
            found.append((run.foreign, run.step_seconds))
        return min(found)[1]


def parse_cell(text: str) -> Cell:
    """`mlp@4@230Mbit`.  Raises BenchmarkError for anything else."""
    model, *place = text.split("@")
    if len(place) != 2 or not place[0].isdecimal():
        raise BenchmarkError(f"{text!r} is no cell; write model, ranks and rate, as in mlp@4@230Mbit")
    rates_of(place[1])
    return Cell(model, "auto", int(place[0]), place[1])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    settings = Settings(args.plans, args.best, args.rounds, args.cpus, args.budget, args.foreign)
    try:
        file, cells = File(args.output), [parse_cell(text) for text in args.cells] or CELLS
        if not args.table:
            file.about = {"command": shlex.join(["python", "-m", "benchmarks.regret", *arguments])}
            file.about |= {"date": time.strftime("%Y-%m-%d"), "machine": machine()}
            regret = Regret(settings, file, lambda line: print(line, file=sys.stderr, flush=True))
            regret.run(cell for cell in cells if cell not in file.cells)
    except (BenchmarkError, SplitcError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    lines = [f"{what}: {words}" for what, words in file.about.items()]
    print(text := "\n".join([*lines, "", report(file.cells)]))
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=[], metavar="MODEL@RANKS@RATE", help="default: twelve")
    parser.add_argument("--plans", type=positive, default=usual.plans, metavar="N", help="measured once, at most")
    parser.add_argument("--best", type=positive, default=usual.best, metavar="N", help="measured again, besides auto's")
    parser.add_argument("--rounds", type=positive, default=usual.rounds, metavar="N", help="how often")
    parser.add_argument("--cpus", type=float, default=usual.cpus, metavar="N", help="processors of all ranks")
    parser.add_argument("--budget", type=float, default=usual.budget, metavar="SECONDS", help="of a calibration")
    parser.add_argument("--foreign", type=float, default=usual.foreign, metavar="X", help="part that may go elsewhere")
    parser.add_argument("--table", action="store_true", help="only show what was measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("-o", "--output", type=Path, default=Path("regret.json"), metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
