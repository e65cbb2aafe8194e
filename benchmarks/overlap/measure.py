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

PARAMETERS = 4.6e6  # of the model
CLASSIFIER, CONVOLUTIONS = 0.4e-3, 2.3e-3  # seconds of an example on one core of 2026; of 224 pixels a side
LAUNCH, AROUND = 45.0, 1.0  # seconds to launch and compile at a place, and around each run

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How sides are measured.

    alternations: pairs of each side that count.  batch: examples of a rank, of `image` pixels a side; the defaults keep
    AlexNet's ratios of parameters, activations and computing at batch 128.  warm_up, steps: of a run.  cpus: shared by
    the ranks, by a quota.  budget: seconds of each calibration, about.  foreign: fraction of the processors above which
    other processes disturb a run.
    """

    alternations: int = 15
    batch: int = 32
    image: int = 224
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


def guess(place: Place, side: Side, settings: Settings) -> float:
    """Seconds of a step before any was measured: DDP by its bytes and its computing; the others take 0.4 of that."""
    computing = CLASSIFIER + CONVOLUTIONS * (settings.image / 224) ** 2
    sent = 2 * (place.world - 1) / place.world * 4 * PARAMETERS
    ddp = sent / (0.955 * place.bandwidth) + settings.batch * computing * place.world / settings.cpus
    return ddp if side.script == "ddp" or side.strategy == "data_parallel" else 0.4 * ddp


class Measuring:
    """The campaign.  sides: of each place, DDP among them."""

    def __init__(self, sides: Mapping[Place, Sequence[Side]], settings: Settings, figures: Figures, say: Say) -> None:
        self._sides, self._settings, self._figures, self._say = sides, settings, figures, say
        for place in sides:
            found = figures.places.setdefault(
                place, Measured(place, settings.batch, settings.cpus, settings.foreign, settings.image)
            )
            if (found.batch, found.image, found.cpus) != (settings.batch, settings.image, settings.cpus):
                raise BenchmarkError(
                    f"{place} was measured with --batch {found.batch} --image {found.image} --cpus {found.cpus:g}; "
                    "measure into another file"
                )
            figures.places[place] = replace(found, foreign=settings.foreign, missing={})

    def rounds(self, place: Place) -> list[list[Side]]:
        """What is missing at a place."""
        return wanted(self._figures.places[place], self._sides[place], self._settings.alternations)

    def estimate(self, place: Place) -> float:
        """Seconds that a place will take, by what was measured before where there is something."""
        found, rounds = self._figures.places[place], self.rounds(place)
        steps = self._settings.warm_up + self._settings.steps
        sides = {side.name: side for each in rounds for side in each}
        each = {
            name: found.seconds(name) if found.runs(name) else guess(place, side, self._settings)
            for name, side in sides.items()
        }
        runs = [AROUND + steps * each[side.name] for some in rounds for side in some]
        return LAUNCH + self._settings.budget + sum(runs) if runs else 0.0

    def run(self) -> None:
        """Measure what is missing.  Raises BenchmarkError when there can be no testbed, or a rank fails."""
        guesses = {place: self.estimate(place) for place in self._sides}
        said = ", ".join(f"{place}: {seconds / 60:.0f} min" for place, seconds in guesses.items())
        self._say(f"about {sum(guesses.values()) / 60:.0f} min ({said})")
        case = Case(
            "alexnet", "x".join(map(str, (self._settings.batch, 3, self._settings.image, self._settings.image)))
        )
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
            image, options = self._settings.image, dict(side.options)
            session.do("script", name=side.name, script=side.script, options=options, total=total, image=image)
            return
        found = self._figures.places[place]
        self._say(f"{place}: compiling {side.name}")
        cell = Cell("alexnet", side.strategy_on(place.world) or "auto", place.world, place.rate)
        try:
            cluster = parse_cluster(found.cluster, f"the cluster of {place}")
            plan = Plan.from_json(Path(side.plan).read_text(encoding="utf-8")) if side.plan else None
            compiled = case.compile(cell, cluster, plan, side.placements(), total)
            predicted = predictions(compiled.program, cluster)["roofline"]
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
