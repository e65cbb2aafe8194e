"""Measure cells: clusters calibrated, then plans made, then all of them run, the best in rounds.

Everything is in the file as soon as it is known, so that a campaign that was stopped goes on in the middle of a cell.
A plan that fails ends the ranks; it is out with its reason, and others are launched for those that are left.
"""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.cases import Case, predictions
from benchmarks.choice.cases import MODELS, decision, proposed
from benchmarks.choice.figures import AUTO, ONE, SCRIPTS, TUNED, Cell, Figures, Measured, Side
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Cell as Planned
from benchmarks.lockstep import TIMEOUT
from benchmarks.overlap.figures import interval
from benchmarks.overlap.sides import Place
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc import units
from splitc.cli.tuning import write
from splitc.errors import SplitcError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster
from splitc.ir.plan import Plan
from splitc.tuned import finalist_of

TRIES = 2  # runs in place of one that other processes disturbed
LONG = 1.0  # seconds of a step from which a run has one step that counts, not two
FAR = 3.0  # times the shortest step, from which one step tells enough: without one to warm up, and never again
NEAR = 1.25  # times the shortest step of the brief runs: those above take no part in rounds
SURE = 4  # rounds after which a plan whose interval is beyond the best one's takes no part any more
SCALE_ROUNDS = 5  # of scripts and of one process, which are for scale

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """rounds: in which the choices and, besides, the `best` plans run.  finalists: of auto's, that run briefly.

    cpus: shared by the ranks, by a quota.  budget: seconds of a calibration, about.  tune: seconds of tuning; 0: none.
    foreign: fraction of the processors above which other processes disturb a run.  until: the last stage.
    strategies: beside auto's finalists; all exact ones where there are none.
    """

    rounds: int = 10
    best: int = 4
    finalists: int = 6
    cpus: float = 2.0
    budget: float = 20.0
    tune: float = 60.0
    foreign: float = 0.05
    until: str = "runs"
    strategies: tuple[str, ...] = ()


STAGES = "clusters", "plans", "runs"


class SideFailed(BenchmarkError):
    """A plan could not be run; the others go on."""


def brief(measured: Measured) -> list[int]:
    """The sides that did not run yet, the shortest first: what is far is known before it runs."""
    sides = {k: each for k, each in enumerate(measured.sides) if not each.first and not each.why}
    return sorted(sides, key=lambda k: sides[k].predicted)


def untuned(measured: Measured, settings: Settings) -> bool:
    return settings.tune > 0 and not measured.tuning


def with_tuned(measured: Measured, plan: Plan, tuning: Mapping[str, Any]) -> Measured:
    """With the plan that tuning chose: one of those that are there, or one more."""
    sides = list(measured.sides)
    same = (k for k, side in enumerate(sides) if side.plan and decision(Plan.from_json(side.plan)) == decision(plan))
    if (at := next(same, None)) is None:
        sides.append(Side((TUNED,), plan.to_json(), plan.step_seconds))
    else:
        sides[at] = replace(sides[at], asked=(*sides[at].asked, TUNED))
    return replace(measured, sides=tuple(sides), tuning=tuning)


def in_rounds(measured: Measured, settings: Settings) -> list[int]:
    """The sides of the next round: the choices, those that may be the best, and the scripts; none when it is done."""
    ran = {k: each.first for k, each in enumerate(measured.sides) if each.plan and each.first and not each.why}
    if not ran:
        return []
    numbers = dict.fromkeys(measured.number(asked) for asked in (AUTO, TUNED))  # which may be one plan
    choices = [k for k in numbers if k in ran]
    made = sum(all(k in each for k in choices) for each in measured.rounds)
    if made >= settings.rounds:
        return []
    others = sorted((k for k in ran if k not in choices and ran[k] <= NEAR * min(ran.values())), key=lambda k: ran[k])
    racing = [*choices, *others[: settings.best]]
    if made >= SURE:
        best = min(racing, key=measured.seconds)
        second = min((k for k in racing if k not in (best, *choices)), key=measured.seconds, default=best)
        stay = {*choices, best, second}
        racing = [k for k in racing if k in stay or not _slower(measured, k, best)]
    scales = (k for name in (*SCRIPTS, ONE) if (k := measured.number(name)) is not None and measured.sides[k].first)
    return [*racing, *(k for k in scales if made < SCALE_ROUNDS and k not in racing)]


def _slower(measured: Measured, k: int, best: int) -> bool:
    ratios = measured.ratios(k, best)
    return len(ratios) < SURE or interval(ratios)[0] > 1


class Measuring:
    """The campaign.  folder: where the clusters lie that tuning writes its records beside."""

    def __init__(self, cells: Iterable[Cell], settings: Settings, figures: Figures, folder: Path, say: Say) -> None:
        self._cells, self._settings, self._figures = list(cells), settings, figures
        self._folder, self._say = folder, say
        self._cases: dict[str, Case] = {}
        for model in dict.fromkeys(cell.model for cell in self._cells):
            if model not in MODELS:
                raise BenchmarkError(f"there is no model {model!r}; there are {', '.join(MODELS)}")

    def run(self) -> None:
        """Measure what is missing.  Raises BenchmarkError when there can be no testbed, or calibration fails."""
        places = dict.fromkeys(cell.place for cell in self._cells)
        for world in dict.fromkeys(place.world for place in places):
            self._calibrate(world, [place for place in places if place.world == world])
        if self._settings.until == "clusters":
            return
        for cell in self._cells:
            self._plan(cell)
        if self._settings.until == "plans":
            return
        for world in dict.fromkeys(place.world for place in places):
            while left := [cell for cell in self._cells if cell.place.world == world and self._is_missing(cell)]:
                try:
                    with self._session(world) as session:
                        for cell in left:
                            _Runs(session, self, cell).run()
                except SideFailed as failed:
                    self._say(f"{failed}\nothers are launched for what is left")

    def predict(self) -> None:
        """Simulate all plans again, on their clusters, by the prices of today."""
        for cell in (each for each in self._cells if each in self._figures.cells):
            found, cluster = self._figures.cells[cell], self.cluster(cell.place)
            sides = list(found.sides)
            for k, side in enumerate(sides):
                if side.plan:
                    sides[k] = replace(side, predicted=self._simulated(cell, side, cluster))
            self._figures.put(replace(found, sides=tuple(sides)))

    def _simulated(self, cell: Cell, side: Side, cluster: Cluster) -> float:
        planned = Planned(cell.model, "auto", cell.place.world, cell.place.rate)
        compiled = self.case(cell.model).compile(planned, cluster, Plan.from_json(side.plan))
        return predictions(compiled.program, cluster)["roofline"]

    # -- what runs share -----------------------------------------------------------------------------------------------

    def case(self, model: str) -> Case:
        if model not in self._cases:
            self._cases[model] = Case(MODELS[model].file, MODELS[model].sizes)
        return self._cases[model]

    def cluster(self, place: Place) -> Cluster:
        return parse_cluster(self._figures.clusters[str(place)], f"the cluster of {place}")

    @property
    def settings(self) -> Settings:
        return self._settings

    def put(self, measured: Measured) -> None:
        self._figures.put(measured)

    def found(self, cell: Cell) -> Measured:
        return self._figures.cells[cell]

    def say(self, text: str) -> None:
        self._say(text)

    # -- stages --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _session(self, world: int) -> Iterator[Session]:
        with (
            NetworkTestbed(world, cpus=self._settings.cpus / world) as testbed,
            Session(testbed, "benchmarks.choice.rank") as session,
        ):
            yield session

    def _calibrate(self, world: int, places: Sequence[Place]) -> None:
        missing = [place for place in places if str(place) not in self._figures.clusters]
        if not missing:
            return
        with self._session(world) as session:
            for place in missing:
                self._say(f"{place}: calibrating")
                session.testbed.set_rate(place.bandwidth)
                self._figures.clusters[str(place)], _ = session.calibrate(self._settings.budget)
                self._figures.write()

    def _plan(self, cell: Cell) -> None:
        if cell in self._figures.cells:
            return
        begin = time.monotonic()
        found = proposed(
            self.case(cell.model), cell, self.cluster(cell.place), self._settings.finalists, self._settings.strategies
        )
        self.put(found)
        plans = sum(bool(side.plan) for side in found.sides)
        self._say(f"{cell}: {plans} plans in {time.monotonic() - begin:.0f} s")

    def _is_missing(self, cell: Cell) -> bool:
        found = self._figures.cells[cell]
        return bool(untuned(found, self._settings) or brief(found) or in_rounds(found, self._settings))


class _Runs:
    """The runs of a cell, in a session of its ranks."""

    def __init__(self, session: Session, campaign: Measuring, cell: Cell) -> None:
        self._session, self._campaign, self._cell = session, campaign, cell
        self._model = MODELS[cell.model]
        self._folders: dict[int, Path] = {}

    @property
    def _found(self) -> Measured:
        return self._campaign.found(self._cell)

    @cached_property
    def _cluster(self) -> Cluster:
        return self._campaign.cluster(self._cell.place)

    def run(self) -> None:
        begin, settings = time.monotonic(), self._campaign.settings
        self._session.testbed.set_rate(self._cell.place.bandwidth)
        with tempfile.TemporaryDirectory(prefix="choice-") as builds:
            if untuned(self._found, settings):
                self._tune(Path(builds))
            for k in brief(self._found):
                self._briefly(k, Path(builds))
            opened: list[int] = []
            while racing := in_rounds(self._found, settings):
                for k in set(opened) - set(racing):
                    self._session.unload(_name(k))
                for k in (each for each in racing if each not in opened):
                    self._open(k, Path(builds))
                opened = racing
                self._round(racing)
            for k in opened:
                self._session.unload(_name(k))
        self._campaign.say(f"{self._cell}: {time.monotonic() - begin:.0f} s")

    def _tune(self, builds: Path) -> None:
        """Let the ranks choose among the finalists, as `splitc tune` does with this budget."""
        settings, found, begin = self._campaign.settings, self._found, time.monotonic()
        self._campaign.say(f"{self._cell}: tuning")
        case, planned = self._campaign.case(self._cell.model), self._planned
        compiled = case.compile(planned, self._cluster, global_batch=found.examples)
        programs = compiled.request.finalists(settings.finalists)
        write(builds, compiled, programs, [finalist_of(each) for each in programs])
        options = {"folder": str(builds), "budget": settings.tune, "momentum": self._model.momentum}
        planned_in, begin = time.monotonic() - begin, time.monotonic()
        try:
            said = self._session.do("tune", None, TIMEOUT + 2 * settings.tune, **options)[0]
        except BenchmarkError as error:
            self._campaign.put(replace(found, tuning={"why": str(error)}))
            raise SideFailed(f"{self._cell}: tuning: {error}") from error
        tuning = {"planning": planned_in, "seconds": time.monotonic() - begin, "tried": said["tried"]}
        self._campaign.put(with_tuned(found, programs[said["fastest"]].plan, tuning))

    @property
    def _planned(self) -> Planned:
        return Planned(self._cell.model, "auto", self._cell.place.world, self._cell.place.rate)

    def _briefly(self, k: int, builds: Path) -> None:
        """Run a side once; where its step is far from the shortest, one step without a warm-up."""
        try:
            self._open(k, builds)
        except SplitcError as error:
            self._put(k, why=str(error))
            return
        side = self._found.sides[k]
        shortest = min((each.first for each in self._found.sides if each.plan and each.first), default=math.inf)
        steps, warm_up = (1, 0) if side.predicted > FAR * shortest else (1 if side.predicted > LONG else 2, 1)
        self._put(k, first=self._seconds(k, steps, warm_up))
        self._session.unload(_name(k))
        found = self._found.sides[k]
        said = f", simulated {units.seconds(found.predicted)}" * bool(found.plan)
        self._campaign.say(f"{self._cell}: {found.name}: {units.seconds(found.first)}{said}")

    def _round(self, racing: Sequence[int]) -> None:
        number = len(self._found.rounds)
        order = random.Random(f"{self._cell} {number}").sample(racing, len(racing))
        seconds = {k: self._seconds(k, 1 if self._found.sides[k].first > LONG else 2, 1) for k in order}
        found = self._found
        self._campaign.put(replace(found, rounds=(*found.rounds, {k: seconds[k] for k in racing})))
        words = ", ".join(f"{found.sides[k].name} {units.seconds(seconds[k])}" for k in racing)
        self._campaign.say(f"{self._cell}: round {number + 1}: {words}")

    def _open(self, k: int, builds: Path) -> None:
        """Open a side on all ranks.  Raises SplitcError where it cannot be compiled."""
        side, name, momentum = self._found.sides[k], _name(k), self._model.momentum
        if not side.plan:
            script, file, sizes = SCRIPTS[side.name], self._model.file, self._model.sizes
            options = {"name": name, "script": script, "model": file, "sizes": sizes, "momentum": momentum}
            self._do(k, lambda: self._session.do("script", None, TIMEOUT, **options))
            return
        if k not in self._folders:
            case = self._campaign.case(self._cell.model)
            compiled = case.compile(self._planned, self._cluster, Plan.from_json(side.plan))
            self._put(k, predicted=predictions(compiled.program, self._cluster)["roofline"])
            self._folders[k] = compiled.save(builds / name)
        self._do(k, lambda: self._session.load(name, self._folders[k], momentum))

    def _seconds(self, k: int, steps: int, warm_up: int) -> float:
        """Of a step, in a run that other processes left alone, or the one that they disturbed the least."""
        foreign = self._campaign.settings.foreign
        runs: list[tuple[float, float]] = []
        while not runs or (runs[-1][0] > foreign and len(runs) < TRIES):
            run = self._do(k, lambda: self._session.run(_name(k), steps, warm_up))
            runs.append((run.foreign, run.step_seconds))
        least, seconds = min(runs)
        self._campaign.put(replace(self._found, disturbed=self._found.disturbed + (least > foreign)))
        return seconds

    def _do(self, k: int, what: Callable[[], T]) -> T:
        """Do what all ranks take part in.  Raises SideFailed, and writes down why, when one of them fails."""
        try:
            return what()
        except BenchmarkError as error:
            self._put(k, why=str(error))
            raise SideFailed(f"{self._cell}: {self._found.sides[k].name}: {error}") from error

    def _put(self, k: int, **what: float | str) -> None:
        found = self._found
        sides = list(found.sides)
        sides[k] = replace(sides[k], **what)  # type: ignore[arg-type]
        self._campaign.put(replace(found, sides=tuple(sides)))


def _name(k: int) -> str:
    return f"side{k}"
