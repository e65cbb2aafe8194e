"""Measure sides in alternations: all of a place's, DDP among them, one after the other in an order drawn anew.

Ranks are launched once for each place, and all sides stay open.  A run beside which other processes took too much of
the processors is thrown away and repeated.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.campaign import TRIES, Progress
from benchmarks.cases import Case, predictions
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Cell
from benchmarks.overlap.figures import Figures, Measured
from benchmarks.overlap.sides import BASE, Place, Side
from benchmarks.session import Run, Session
from benchmarks.testbed import NetworkTestbed
from splitc import units
from splitc.errors import SplitcError
from splitc.ir.cluster_file import parse_cluster
from splitc.ir.plan import Plan

PARAMETERS, COMPUTING = 4.6e6, 0.6e-3  # of the model; seconds of an example on one core of 2026
LAUNCH, AROUND = 45.0, 1.0  # seconds to launch and compile at a place, and around each run

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How sides are measured.

    alternations: pairs of each side that count.  batch: examples of a rank.  warm_up, steps: of a run.  cpus: shared by
    the ranks, by a quota.  budget: seconds of each calibration, about.  foreign: fraction of the processors above which
    other processes disturb a run.
    """

    alternations: int = 15
    batch: int = 64
    warm_up: int = 1
    steps: int = 2
    cpus: float = 2.0
    budget: float = 10.0
    foreign: float = 0.05


def wanted(measured: Measured, sides: Sequence[Side], alternations: int) -> list[list[Side]]:
    """The sides of each alternation that is missing: DDP, and those with too few pairs that count."""
    base = [side for side in sides if side.name == BASE]
    short = {side.name: alternations - len(measured.ratios(side.name)) for side in sides}
    others = [side for side in sides if side.name != BASE and side.name not in measured.missing]
    most = max([short[side.name] for side in others or base], default=0)
    return [[*base, *(side for side in others if short[side.name] > k)] for k in range(most)]


def estimate(place: Place, rounds: Sequence[Sequence[Side]], settings: Settings) -> float:
    """Seconds of a place: DDP by its bytes and its computing, every other side as if it took 0.6 of that."""
    if not rounds:
        return 0.0
    sent = 2 * (place.world - 1) / place.world * 4 * PARAMETERS
    ddp = sent / (0.955 * place.bandwidth) + settings.batch * COMPUTING * place.world / settings.cpus
    steps = settings.warm_up + settings.steps
    runs = [AROUND + steps * ddp * (1 if side.name == BASE else 0.6) for each in rounds for side in each]
    return LAUNCH + settings.budget + sum(runs)


class Measuring:
    """The campaign.  sides: of each place, DDP among them."""

    def __init__(self, sides: Mapping[Place, Sequence[Side]], settings: Settings, figures: Figures, say: Say) -> None:
        self._sides, self._settings, self._figures, self._say = sides, settings, figures, say
        for place in sides:
            found = figures.places.setdefault(place, Measured(place, settings.batch, settings.cpus, settings.foreign))
            if (found.batch, found.cpus) != (settings.batch, settings.cpus):
                raise BenchmarkError(
                    f"{place} was measured with --batch {found.batch} --cpus {found.cpus:g}; measure into another file"
                )
            figures.places[place] = replace(found, foreign=settings.foreign, missing={})

    def rounds(self, place: Place) -> list[list[Side]]:
        """What is missing at a place."""
        return wanted(self._figures.places[place], self._sides[place], self._settings.alternations)

    def run(self) -> None:
        """Measure what is missing.  Raises BenchmarkError when there can be no testbed, or a rank fails."""
        guesses = {place: estimate(place, self.rounds(place), self._settings) for place in self._sides}
        said = ", ".join(f"{place}: {seconds / 60:.0f} min" for place, seconds in guesses.items())
        self._say(f"about {sum(guesses.values()) / 60:.0f} min ({said})")
        case = Case("alexnet", f"{self._settings.batch}x3x64x64")
        for place in self._sides:
            if self.rounds(place):
                self._place(place, case)

    def _place(self, place: Place, case: Case) -> None:
        share = self._settings.cpus / place.world
        with (
            tempfile.TemporaryDirectory(prefix="overlap-") as builds,
            NetworkTestbed(place.world, cpus=share) as testbed,
            Session(testbed, "benchmarks.overlap.rank") as session,
        ):
            self._calibrate(session, place)
            for side in self.rounds(place)[0]:
                self._open(session, place, side, case, Path(builds))
            testbed.set_rate(place.bandwidth)
            rounds = self.rounds(place)
            progress = Progress(len(rounds))
            for number, sides in enumerate(rounds):
                begin, runs = time.monotonic(), {}
                order = random.Random(f"{place} {number}").sample(sides, len(sides))
                for side in order:
                    runs[side.name] = self._once(session, side)
                found = self._figures.places[place]
                in_order = {side.name: runs[side.name] for side in sides}
                self._figures.put(replace(found, alternations=(*found.alternations, in_order)))
                words = ", ".join(f"{name} {units.seconds(run.step_seconds)}" for name, run in in_order.items())
                self._say(f"{progress.step(time.monotonic() - begin)}  {place}: {words}")

    def _calibrate(self, session: Session, place: Place) -> None:
        found = self._figures.places[place]
        if found.cluster:
            return
        self._say(f"{place}: calibrating")
        session.testbed.set_rate(place.bandwidth)
        cluster, _ = session.calibrate(self._settings.budget)
        session.testbed.set_rate(None)
        self._figures.put(replace(found, cluster=cluster))

    def _open(self, session: Session, place: Place, side: Side, case: Case, folder: Path) -> None:
        """Open a side on all ranks, or write down why it is missing; without a rate, for DDP sends all weights."""
        total = place.world * self._settings.batch
        if side.script:
            session.do("script", name=side.name, script=side.script, options=dict(side.options), total=total)
            return
        found = self._figures.places[place]
        self._say(f"{place}: compiling {side.name}")
        cell = Cell("alexnet", side.strategy_on(place.world) or "auto", place.world, place.rate)
        try:
            cluster = parse_cluster(found.cluster, f"the cluster of {place}")
            plan = Plan.from_json(Path(side.plan).read_text(encoding="utf-8")) if side.plan else None
            compiled = case.compile(cell, cluster, plan, side.placements(), total)
            predicted = predictions(case, compiled.program, cluster)["roofline"]
        except (SplitcError, BenchmarkError, OSError) as error:
            self._say(f"{place}: {side.name}: {error}")
            self._figures.put(replace(found, missing={**found.missing, side.name: str(error)}))
            return
        session.load(side.name, compiled.save(folder / f"side{len(list(folder.iterdir()))}"))
        self._figures.put(
            replace(
                found,
                plans={**found.plans, side.name: compiled.plan.to_json()},
                predicted={**found.predicted, side.name: predicted},
            )
        )

    def _once(self, session: Session, side: Side) -> Run:
        """A run that other processes left alone, or the one that they disturbed the least."""
        runs: list[Run] = []
        while not runs or (runs[-1].foreign > self._settings.foreign and len(runs) < TRIES):
            runs.append(session.run(side.name, self._settings.steps, self._settings.warm_up))
        return min(runs, key=lambda run: run.foreign)
