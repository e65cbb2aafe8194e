"""Measure the curves that are missing: one launch for each number of ranks, one seed after the other.

A curve is trained in parts.  Between two of them the ranks stand still: the parent reads the counters of their links,
fetches the whole model's weights, and evaluates it with all processors, outside the clock.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

import splitc
from benchmarks.approximate.curves import FOREIGN, Bed, Curve, Key, Point, Results, mean
from benchmarks.approximate.data import Data
from benchmarks.approximate.methods import METHODS, Method
from benchmarks.approximate.tasks import TASKS, Task, held_out
from benchmarks.campaign import Progress
from benchmarks.machine import machine
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc.errors import SplitcError
from splitc.ir.cluster_file import parse_cluster

MTU = 9000  # fewer frames, so that the network takes less of the processors
PACED = 15  # steps from which the seconds of computing are taken

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How curves are measured.

    cpus: processors that the ranks share, by a quota.  budget: seconds of each calibration, about.  foreign: fraction
    of the processors above which other processes disturb a curve.  tries: how often a disturbed one is measured at
    most; then the quietest is kept.
    """

    cpus: float = 2.0
    budget: float = 12.0
    foreign: float = FOREIGN
    tries: int = 2


def wanted(tasks: Sequence[str], worlds: Sequence[int], methods: Sequence[str], seeds: int) -> list[Key]:
    """All curves, in the order in which they are measured: by world, then by seed, and those of a seed shuffled."""
    keys = []
    for world in worlds:
        for seed in range(seeds):
            some = [
                Key(task, world, name, seed)
                for task in tasks
                for name in methods
                if seed < TASKS[task].seeds(world, METHODS[name])
            ]
            random.Random(f"{world} {seed}").shuffle(some)
            keys += some
    return keys


def measure(keys: Sequence[Key], results: Results, settings: Settings, say: Say) -> None:
    """Measure those of `keys` that are missing in `results`, and add each as soon as it is there.

    Raises BenchmarkError when there can be no testbed, or a rank fails.
    """
    missing = results.missing((key, TASKS[key.task].recipe(METHODS[key.method])) for key in keys)
    progress = Progress(len(missing))
    with tempfile.TemporaryDirectory(prefix="approximate-") as folder:
        files = {}
        for name in dict.fromkeys(key.task for key in missing):
            say(f"{name}: making the data")
            files[name] = Path(folder) / f"{name}.pt"
            TASKS[name].make().save(files[name])
        for world in dict.fromkeys(key.world for key in missing):
            with (
                NetworkTestbed(world, cpus=settings.cpus / world, mtu=MTU) as testbed,
                Session(testbed, "benchmarks.approximate.rank") as session,
            ):
                ranks = Measuring(session, Path(folder), files, results, settings, say)
                for key in (key for key in missing if key.world == world):
                    begin = time.monotonic()
                    said = ranks.curve(key)
                    say(f"{progress.step(time.monotonic() - begin)}  {key}: {said}")


class Measuring:
    """Curves of one number of ranks.  files: the data of each task."""

    def __init__(
        self, session: Session, folder: Path, files: Mapping[str, Path], results: Results, settings: Settings, say: Say
    ) -> None:
        self._session, self._folder, self._files = session, folder, files
        self._results, self._settings, self._say = results, settings, say
        self._data = {name: Data.load(file) for name, file in files.items()}
        self._builds: dict[tuple[str, str], tuple[Path, str]] = {}

    def curve(self, key: Key) -> str:
        """Measure a curve, and say how it went."""
        task, method = TASKS[key.task], METHODS[key.method]
        bed = self._bed(task)
        self._session.testbed.set_rate(bed.rate)
        folder, plan = None, ""
        if method.strategy is not None:
            try:
                folder, plan = self._build(task, method, bed)
            except SplitcError as error:
                return f"not measured: {error}"
        curves: list[Curve] = []
        while not curves or (curves[-1].foreign > self._settings.foreign and len(curves) < self._settings.tries):
            curves.append(self._once(key, task, method, folder, plan))
        best = min(curves, key=lambda curve: curve.foreign)
        self._results.add(best)
        return f"{best.final:.1%} after {best.points[-1].seconds:.1f} s"

    def _bed(self, task: Task) -> Bed:
        """The network of a task, measured once."""
        world = self._session.testbed.world
        if (found := self._results.beds.get((task.name, world))) is not None:
            return found
        self._session.testbed.set_rate(None)
        paces = self._session.do("pace", task=task.name, data=str(self._files[task.name]), steps=PACED)
        compute = mean([each["seconds"] for each in paces])
        rate = 4 * task.parameters / (task.ratio * compute)
        self._say(f"{task.name}, {world} ranks: {compute * 1e3:.1f} ms to compute a step, {rate * 8e-6:.0f} Mbit/s")
        self._session.testbed.set_rate(rate)
        cluster, _ = self._session.calibrate(self._settings.budget)
        about = f"{time.strftime('%Y-%m-%d')}, {machine()}"
        bed = Bed(task.name, world, compute, rate, cluster, about)
        self._results.add(bed)
        return bed

    def _build(self, task: Task, method: Method, bed: Bed) -> tuple[Path, str]:
        """What splitc makes of a method: the folder of the build, and its plan in a line."""
        if (task.name, method.name) not in self._builds:
            world, part = bed.world, task.batch // bed.world
            examples = self._data[task.name]
            program = splitc.compile(
                task.model(),
                world,
                examples.inputs[:part],
                examples.labels[:part],
                F.cross_entropy,
                global_batch=task.batch,
                cluster=parse_cluster(bed.cluster, f"the cluster of {task.name}, {world} ranks"),
                strategy=method.strategy or "auto",
            )
            assert isinstance(program, splitc.CompiledProgram)
            folder = program.save(self._folder / f"{world}-{task.name}-{method.name.replace(' ', '-')}")
            self._builds[task.name, method.name] = folder, program.plan.strategy
        return self._builds[task.name, method.name]

    def _once(self, key: Key, task: Task, method: Method, folder: Path | None, plan: str) -> Curve:
        session, data = self._session, str(self._files[task.name])
        build = None if folder is None else str(folder)
        rate = task.rates[method.family]
        session.do("open", task=task.name, data=data, folder=build, rate=rate, seed=key.seed)
        session.testbed.watch_load()
        points: list[Point] = []
        seconds = sent = 0.0
        for before, steps in pairwise([0, *method.evaluations(task.steps)]):
            counted = self._sent()
            said = session.do("train", steps=steps - before)
            seconds += max(each["end"] for each in said) - max(each["begin"] for each in said)
            sent += self._sent() - counted
            accuracy, loss = self._evaluate(task)
            points.append(Point(steps * task.batch, seconds, accuracy, loss, sent))
        foreign = session.testbed.foreign_load()
        session.do("close")
        return Curve(key, task.recipe(method), plan, foreign, tuple(points))

    def _sent(self) -> float:
        """Bytes that a rank has sent so far, the mean over the ranks."""
        testbed = self._session.testbed
        return mean([testbed.bytes_sent(rank) for rank in range(testbed.world)])

    def _evaluate(self, task: Task) -> tuple[float, float]:
        file = self._folder / "weights.pt"
        self._session.do("weights", file=str(file))
        return held_out(task, self._data[task.name], torch.load(file, weights_only=True))
