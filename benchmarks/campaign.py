"""Measure many cells in turns: one launch for each world, and every repetition goes over all cells in another order.

Whatever drifts on the machine, its clock or its neighbours, so meets all cells alike.  A run has some steps to warm up
and at least `LEAST` that count, more when they are short, so that it lasts `LONG` seconds.  A run beside which other
processes took too much of the processors is thrown away and repeated, `TRIES` times at the most; then the quietest one
is kept, and its figures tell.

Cells whose plans come out alike, at two rates for example, share one build.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, predictions
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Cell, Figures, Result
from benchmarks.layout import parse_rates
from benchmarks.session import Run, Session
from benchmarks.testbed import NetworkTestbed
from splitc import units
from splitc.errors import SplitcError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster

LEAST, MOST = 3, 200  # steps that count in a run
LONG = 1.0  # seconds that they take, where `MOST` allows it
TRIES = 4
WARM_UP = 2  # steps of a run before those that count

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How a campaign is carried out.

    repeats: runs of every cell.  cpus: processors that the ranks share, by a quota.  mtu: of links.  budget: seconds of
    each calibration, about.  foreign: fraction of the processors above which other processes disturb a run.
    clusters: a folder with the clusters of an earlier campaign, in place of calibrating.
    """

    repeats: int = 5
    cpus: float = 2.0
    mtu: int = 1500
    budget: float = 30.0
    foreign: float = 0.05
    clusters: Path | None = None


def steps_for(seconds: float) -> int:
    """The number of steps of `seconds` that a run counts."""
    return min(MOST, max(LEAST, math.ceil(LONG / seconds)))


def cluster_file(folder: Path, world: int, rate: str) -> Path:
    """Where the calibrated cluster of a world at a rate stands."""
    return folder / f"cluster-{world}-{rate}.toml"


class Campaign:
    """Measures `cells`.

    folder: where the figures go, `figures.json` after each repetition, and the calibrated clusters.  say: told what it
    is at.
    """

    def __init__(self, cells: Iterable[Cell], settings: Settings, folder: Path, say: Say) -> None:
        self.settings, self.folder, self._say = settings, folder, say
        self._results = {cell: Result(cell) for cell in cells}
        self._cases: dict[str, Case] = {}
        self._clusters: dict[str, str] = {}
        self._residuals: dict[str, list[dict[str, Any]]] = {}
        self._steps: dict[Cell, int] = {}
        self._about: Mapping[str, str] = {}
        self._progress = Progress(settings.repeats * len(self._results))

    def run(self, about: Mapping[str, str]) -> None:
        """Measure everything.  about: goes with the figures.

        Raises BenchmarkError when there can be no testbed, or a rank fails; what was measured before is in the figures.
        """
        self._about = about
        self._cases = {name: Case(name) for name in dict.fromkeys(cell.model for cell in self._results)}
        try:
            for world in dict.fromkeys(cell.world for cell in self._results):
                self._world(world, [cell for cell in self._results if cell.world == world])
        finally:
            if self.figures.measured:  # or those of an earlier campaign stay
                self._write()

    @property
    def figures(self) -> Figures:
        """As far as the campaign has come."""
        results = tuple(self._results.values())
        return Figures(self._about, self.settings.foreign, self._clusters, self._residuals, results)

    def _world(self, world: int, cells: list[Cell]) -> None:
        share = self.settings.cpus / world
        with (
            tempfile.TemporaryDirectory(prefix="campaign-") as builds,
            NetworkTestbed(world, cpus=share, mtu=self.settings.mtu) as testbed,
            Session(testbed) as session,
        ):
            clusters = {rate: self._cluster(session, rate) for rate in dict.fromkeys(cell.rate for cell in cells)}
            folders = self._compile(cells, clusters, Path(builds))
            self._progress.drop(self.settings.repeats * (len(cells) - len(folders)))
            for repetition in range(self.settings.repeats):
                order = list(folders)
                random.Random(f"{world} {repetition}").shuffle(order)
                for cell in order:
                    begin = time.monotonic()
                    run = self._measure(session, cell, folders[cell])
                    before = self._results[cell]
                    self._results[cell] = replace(before, runs=(*before.runs, run))
                    done = self._progress.step(time.monotonic() - begin)
                    self._say(f"{done}  {cell}: {units.seconds(run.step_seconds)}")
                self._write()

    def _cluster(self, session: Session, rate: str) -> Cluster:
        """The cluster that the ranks are at a rate, calibrated or from the folder of an earlier campaign."""
        world, settings = session.testbed.world, self.settings
        key = f"{world} {rate}"
        if settings.clusters is not None:
            path = cluster_file(settings.clusters, world, rate)
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise BenchmarkError(f"{path}: {error.strerror}; leave --clusters out to calibrate") from error
            self._residuals[key] = []
        else:
            self._say(f"{world} ranks, {rate}: calibrating, about {settings.budget:.0f} s")
            session.testbed.set_rate(rates_of(rate))
            text, self._residuals[key] = session.calibrate(
                settings.budget, lambda what: self._say(f"{world} ranks, {rate}: {what}")
            )
            cluster_file(self.folder, world, rate).write_text(text, encoding="utf-8")
        self._clusters[key] = text
        return parse_cluster(text, f"the cluster of {world} ranks, {rate}")

    def _compile(self, cells: list[Cell], clusters: Mapping[str, Cluster], folder: Path) -> dict[Cell, Path]:
        """Compile all cells: cell -> its build.  Cells without a plan are left out."""
        folders: dict[Cell, Path] = {}
        for cell in cells:
            self._say(f"compiling {cell}")
            case = self._cases[cell.model]
            try:
                compiled = case.compile(cell, clusters[cell.rate])
                predicted = predictions(compiled.program, clusters[cell.rate])
            except SplitcError as error:
                self._results[cell] = replace(self._results[cell], why=str(error))
                continue
            folders[cell] = folder / f"build{list(self._cases).index(cell.model)}-{compiled.plan.hash}"
            if not folders[cell].exists():
                compiled.save(folders[cell])
            self._results[cell] = replace(self._results[cell], plan=compiled.plan.to_json(), predicted=predicted)
        return folders

    def _measure(self, session: Session, cell: Cell, folder: Path) -> Run:
        """One run of a cell that other processes left alone, or the one that they disturbed the least.

        Its build alone is open meanwhile: with thirty of them in one process every step took up to twice as long.
        """
        session.testbed.set_rate(rates_of(cell.rate))
        session.load(folder.name, folder)
        runs = []
        if cell not in self._steps:
            first = session.run(folder.name, LEAST, WARM_UP)
            self._steps[cell] = steps_for(first.step_seconds)
            runs = [first] if self._steps[cell] == LEAST else []
        while not runs or (runs[-1].foreign > self.settings.foreign and len(runs) < TRIES):
            runs.append(session.run(folder.name, self._steps[cell], WARM_UP))
        session.unload(folder.name)
        return min(runs, key=lambda run: run.foreign)

    def _write(self) -> None:
        partial = self.folder / "figures.json.partial"
        partial.write_text(self.figures.to_json(), encoding="utf-8")
        partial.replace(self.folder / "figures.json")


@dataclass
class Progress:
    """How many of the runs are done, and for how long the others will take."""

    total: int
    done: int = 0
    spent: float = 0.0

    def step(self, seconds: float) -> str:
        """One more is done, in so many seconds."""
        self.done, self.spent = self.done + 1, self.spent + seconds
        left = self.spent / self.done * (self.total - self.done)
        return f"[{self.done}/{self.total}, {math.ceil(left / 60)} min left]"

    def drop(self, runs: int) -> None:
        """So many will not take place."""
        self.total -= runs


def rates_of(rate: str) -> float | list[float] | None:
    """What a testbed takes: `230Mbit`, `230Mbit,100Mbit`, or None for "none"."""
    return None if rate == "none" else parse_rates(rate)
