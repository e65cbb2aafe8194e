"""One launch for many measurements: ranks that stay alive on a testbed while builds and rates are swapped.

    with NetworkTestbed(2, cpus=1.0) as testbed, Session(testbed) as session:
        session.load("mlp", folder)
        for rate in (None, parse_rate("230Mbit")):
            testbed.set_rate(rate)
            print(session.run("mlp", steps=4).step_seconds)

Starting processes, importing torch and joining takes seconds, a step tenths of one.  The ranks (`session_rank`) take
commands through their pipes, so between two runs nothing travels on the testbed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.errors import BenchmarkError
from benchmarks.lockstep import TIMEOUT, Lockstep
from benchmarks.testbed import NetworkTestbed

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 2  # steps; TCP finds the rate of the links, and processors their caches
UNEVEN = 0.5  # fraction of their speed that processors may lose by themselves: under quotas up to 0.48
LEAVING = 30.0  # seconds that ranks may take to leave when they are told to stop: 3 to 8 on a machine with a load of 8


@dataclass(frozen=True)
class Run:
    """What the ranks did in the steps of one run that count; everything is one entry for each rank.

    begins, ends: the clock around each step (s), the same for all ranks, 0 at the first begin.  sent: payload bytes
    of a step.  processor: seconds on processors of a step.  carried, arrived: bytes of the frames that the link took
    from the rank and gave it, of a step, the mean with those that warm up.  foreign: fraction of the processors that
    other processes took, or of their speed that other machines on the same host took, which only the pace of the ranks
    shows.
    """

    begins: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    sent: tuple[float, ...]
    processor: tuple[float, ...]
    carried: tuple[float, ...]
    foreign: float
    arrived: tuple[float, ...] = ()

    @property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of each step, rank by rank."""
        return tuple(
            tuple(end - begin for begin, end in zip(*each, strict=True))
            for each in zip(self.begins, self.ends, strict=True)
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of all ranks together, the mean of the run: from the last begin to the last end.

        Without barriers a step begins where the one before ends, so this is the steady state.
        """
        begins: list[float] = [max(clocks) for clocks in zip(*self.begins, strict=True)]
        ends: list[float] = [max(clocks) for clocks in zip(*self.ends, strict=True)]
        return (sum(ends) - sum(begins)) / len(ends)


class Session:
    """Ranks on a testbed that stands.  The end of its `with` stops them; after an error the testbed ends what is left.

    module: what each rank runs; it calls `session_rank.serve`.
    Every method raises BenchmarkError, with the last lines of its errors, when a rank fails; then the session is over.
    """

    def __init__(self, testbed: NetworkTestbed, module: str = "benchmarks.session_rank") -> None:
        self._module = module
        self._best: list[float] = []  # seconds of the ranks' pace
        self.testbed = testbed
        self._files = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lockstep = Lockstep([], [])
        self._over = False
        self.logs: list[Path] = []  # what the ranks print

    def __enter__(self) -> Self:
        folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="session-")))
        self.logs = [folder / f"rank{rank}.log" for rank in range(self.testbed.world)]
        try:
            for rank, log in enumerate(self.logs):
                with log.open("wb") as errors:
                    command = [sys.executable, "-m", self._module]
                    pipe = subprocess.PIPE
                    process = self.testbed.start(rank, command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors)
                self._processes.append(process)
            self._lockstep = Lockstep(self._processes, self.logs)
            self._lockstep.hear("ready")
        except BaseException:
            self._files.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None and not self._over:
                self._lockstep.order(do="stop")
                for rank, process in enumerate(self._processes):
                    try:
                        process.wait(LEAVING)
                    except subprocess.TimeoutExpired as late:
                        raise BenchmarkError(f"rank {rank} did not leave within {LEAVING:g} s") from late
        finally:
            self._files.close()

    def load(self, name: str, folder: Path, momentum: float = 0.9) -> None:
        """Open the workers of the build in `folder`, under a name.  momentum: of their SGD."""
        self.do("load", name=name, folder=str(folder.resolve()), momentum=momentum)

    def unload(self, name: str) -> None:
        """Forget the workers of a build."""
        self.do("unload", name=name)

    def run(self, name: str, steps: int, warm_up: int = WARM_UP, apart: bool = False, timeout: float = TIMEOUT) -> Run:
        """Train a build on one batch, again and again.  apart: with a barrier before each step that counts."""
        ranks = range(self.testbed.world)
        self.testbed.watch_load()
        before = [(self.testbed.bytes_sent(rank), self.testbed.bytes_received(rank)) for rank in ranks]
        said = self.do("run", timeout=timeout, name=name, steps=steps, warm_up=warm_up, apart=apart)
        foreign = max(self.testbed.foreign_load(), self._lost([each["pace"] for each in said]))
        after = [(self.testbed.bytes_sent(rank), self.testbed.bytes_received(rank)) for rank in ranks]
        carried, arrived = (
            tuple((after[rank][way] - before[rank][way]) / (steps + warm_up) for rank in ranks) for way in (0, 1)
        )
        first = min(each["begins"][0] for each in said)
        begins, ends = (
            tuple(tuple(round(clock - first, 7) for clock in each[what]) for each in said)
            for what in ("begins", "ends")
        )
        return Run(
            begins=begins,
            ends=ends,
            sent=tuple(each["sent"] / steps for each in said),
            processor=tuple(each["processor"] / steps for each in said),
            carried=carried,
            foreign=foreign,
            arrived=arrived,
        )

    def _lost(self, paces: list[float]) -> float:
        """The fraction of their best speed so far that the ranks have lost, where it is more than they do alone."""
        self._best = [min(pair) for pair in zip(self._best or paces, paces, strict=True)]
        lost = max(1 - best / pace for best, pace in zip(self._best, paces, strict=True))
        return lost if lost > UNEVEN else 0.0

    def calibrate(
        self, budget: float, progress: Callable[[str], None] = lambda text: None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Measure the ranks as a cluster, in about `budget` seconds: its TOML, and the residuals of the fits."""
        told: set[str] = set()

        def once(rank: int, text: str) -> None:  # all ranks tell the same
            if text not in told:
                told.add(text)
                progress(text)

        said = self.do("calibrate", once, TIMEOUT + 2 * budget, budget=budget)
        return said[0]["cluster"], said[0]["residuals"]

    def do(
        self,
        command: str,
        progress: Callable[[int, str], None] | None = None,
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """What the ranks answer to a command, in their order.  progress: called with a rank and what it is at."""
        if self._over:
            raise BenchmarkError(f"the session is over, a rank has failed before {command!r}; start another one")
        self._over = True  # unless all ranks come to the end of it
        self._lockstep.order(do=command, **options)
        said = self._lockstep.hear(command, timeout, progress)
        self._over = False
        return said
