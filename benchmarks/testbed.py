"""A network of one's own for the ranks of a benchmark, on one machine, without leaving anything behind.

    with NetworkTestbed(4, rate=parse_rate("230Mbit"), cpus=0.5) as testbed:
        ranks = [testbed.start(rank, [sys.executable, "script.py"]) for rank in range(4)]
        ...
        testbed.bytes_sent(0)

Each rank has a network namespace and a link to a switch, shaped at both ends when it has a rate (`layout` says how).
The kernel counts every frame that passes a rank's link, so what a program says that it sends can be held against what
it sends.  Needs Linux, root, and `ip` and `tc` of iproute2.

The processes that were started and the network go when the `with` block is left, on whatever way: also by Ctrl-C,
SIGTERM or SIGHUP.  What a run that was killed outright left behind is removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from benchmarks.errors import BenchmarkError
from benchmarks.layout import INTERFACE, Command, Layout, for_each, leftovers, new_label
from benchmarks.load import Load, processes, started
from benchmarks.quota import groups, make_quotas

PORT = 29500  # of rank 0, where the ranks meet
LEAVING = 2.0  # seconds that killed processes may take to be gone

_STOPS = (signal.SIGTERM, signal.SIGHUP)  # unwind the program as Ctrl-C does
_numbers = itertools.count()

File = int | IO[Any] | None


class NetworkTestbed:
    """A testbed for `world` ranks; its network stands inside `with`.

    rate: bytes/s of each link, both ways, one for all or one for each rank; None is as fast as the machine goes.
    cpus: how much of a processor each rank has, one for all or one for each; None is no limit.
    mtu, congestion: as in `Layout`.

    Raises BenchmarkError when the machine cannot do what is asked for.
    """

    def __init__(
        self,
        world: int,
        rate: float | Iterable[float | None] | None = None,
        cpus: float | Iterable[float | None] | None = None,
        mtu: int = 1500,
        congestion: str = "reno",
    ) -> None:
        if world < 1:
            raise BenchmarkError(f"a testbed for {world} ranks; it needs one at least")
        label = new_label(os.getpid(), started(os.getpid()) or 0, next(_numbers))
        self.world = world
        self.layout = Layout(label, world, for_each(rate, world, "rate"), mtu, congestion)
        self.cpus = for_each(cpus, world, "cpus")
        self._processes: list[list[subprocess.Popen[bytes]]] = [[] for _ in range(world)]
        self._groups: dict[int, Path] = {}
        self._owner: int | None = None  # the process that has to clean up, while there is something
        self._before: dict[signal.Signals, Any] = {}
        self._load = Load()

    def __enter__(self) -> NetworkTestbed:
        _check_machine(shaped=any(rate is not None for rate in self.layout.rates))
        remove_leftovers()
        self._owner = os.getpid()
        atexit.register(self.close)
        if threading.current_thread() is threading.main_thread():
            self._before = {each: signal.signal(each, _stop) for each in _STOPS}
        try:
            limited = [rank for rank, share in enumerate(self.cpus) if share is not None]
            names = [self.layout.namespace(rank) for rank in limited]
            made = make_quotas(names, [self.cpus[rank] or 0 for rank in limited]) if limited else []
            self._groups = dict(zip(limited, made, strict=True))
            for command in self.layout.build():
                _run(command)
        except BaseException:
            self.close()
            raise
        self._load = Load()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what was started and remove the network; a second time does nothing.

        Raises BenchmarkError that lists what could not be removed.
        """
        if self._owner != os.getpid():
            return  # closed already, or a fork of the process that cleans up
        self._owner = None
        with _undisturbed():
            for rank in range(self.world):
                self.kill(rank)
            for process in itertools.chain.from_iterable(self._processes):
                for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                    pipe.close()
            problems = _remove(self.layout.namespaces, self._groups.values())
            for number, handler in self._before.items():
                signal.signal(number, handler)
            atexit.unregister(self.close)
        if problems:
            raise BenchmarkError(f"the testbed could not be removed: {'; '.join(problems)}")

    def environment(self, rank: int) -> dict[str, str]:
        """What torch.distributed and splitc need to know on a rank, as torchrun would set it."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world),
            "MASTER_ADDR": self.layout.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a rank, with `environment` and `env` besides this process's own.

        It leads a process group of its own, which ends with the testbed.  Its pipes have no buffer.
        """
        command = ["ip", "netns", "exec", self.layout.namespace(rank)]
        if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
            command += ["setpriv", "--pdeathsig", "KILL"]  # should this process be killed outright
        if rank in self._groups:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._groups[rank] / "cgroup.procs"), *command]
        process = subprocess.Popen(
            [*command, *argv],
            bufsize=0,
            cwd=cwd,
            env={**os.environ, **self.environment(rank), **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes[rank].append(process)
        return process

    def kill(self, rank: int) -> None:
        """End the processes that were started on a rank, at once and without a word, like a machine that fails."""
        for process in self._processes[rank]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def set_rate(self, rate: float | Iterable[float | None] | None) -> None:
        """Give the links another rate, as for a new testbed; the processes go on.

        What waits at a link that loses its shape is dropped, so it is best done while the ranks stand still.
        """
        rates = for_each(rate, self.world, "rate")
        _check_machine(shaped=any(each is not None for each in rates))
        for command in self.layout.reshape(rates):
            _run(command)
        self.layout = replace(self.layout, rates=rates)

    def unplug(self, rank: int) -> None:
        """Take a rank off the network; its processes go on."""
        _run(self.layout.plug(rank, up=False))

    def plug(self, rank: int) -> None:
        """Put a rank that was unplugged back on the network."""
        _run(self.layout.plug(rank, up=True))

    def lose(self, rank: int) -> None:
        """Take the machine of a rank away: first its cable, so that nobody hears that its processes end, then all."""
        self.unplug(rank)
        name = self.layout.namespace(rank)
        while there := processes(name):
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for command in self.layout.remove(rank):
            _run(command)

    def bring_back(self, rank: int) -> None:
        """Put a machine that was lost back, as one that has started anew."""
        for command in self.layout.machine(rank):
            _run(command)

    def bytes_sent(self, rank: int) -> int:
        """Bytes of all frames, headers included, that a rank has put on its link so far."""
        return self._counter(rank, "tx")

    def bytes_received(self, rank: int) -> int:
        """Bytes of all frames, headers included, that have arrived at a rank so far."""
        return self._counter(rank, "rx")

    def foreign_load(self) -> float:
        """Fraction of the processors that other processes took since the testbed was made, or since `watch_load`."""
        return self._load.foreign()

    def watch_load(self) -> None:
        """Count `foreign_load` from now on."""
        self._load = Load()

    def _counter(self, rank: int, way: str) -> int:
        return int(json.loads(_run(self.layout.counters(rank)))[0]["stats64"][way]["bytes"])


def remove_leftovers() -> list[str]:
    """Remove the namespaces and groups of testbeds whose process is gone, and return their names."""
    made = groups()
    there = {line.split()[0] for line in _run(("ip", "netns", "list")).splitlines()}
    names = leftovers(sorted(there | made.keys()), started)
    for name in set(names) & there:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # or another one was quicker
    for name in set(names) & made.keys():
        with contextlib.suppress(OSError):  # a process in it has not ended yet; the next testbed will find it
            made[name].rmdir()
    return names


def _remove(namespaces: Iterable[str], made: Iterable[Path]) -> list[str]:
    """What could not be removed.  A namespace that was not made yet is none of it."""
    problems = []
    there = {line.split()[0] for line in _run(("ip", "netns", "list")).splitlines()}
    for name in (each for each in namespaces if each in there):
        done = subprocess.run(["ip", "netns", "delete", name], text=True, capture_output=True, check=False)
        if done.returncode:
            problems.append(f"{name}: {done.stderr.strip()}")
    deadline = time.monotonic() + LEAVING
    for path in made:
        try:
            while (path / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
                time.sleep(0.01)
            path.rmdir()
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    return problems


def _check_machine(shaped: bool) -> None:
    needed: dict[str, Callable[[], bool]] = {
        "Linux": lambda: sys.platform == "linux",
        "root: run it with sudo": lambda: os.geteuid() == 0,
        "the command ip: install iproute2": lambda: shutil.which("ip") is not None,
    }
    if shaped:
        needed["the command tc: install iproute2"] = lambda: shutil.which("tc") is not None
    for what, there in needed.items():
        if not there():
            raise BenchmarkError(f"the network testbed needs {what}")


def _run(command: Command) -> str:
    """The output of a command.  Raises BenchmarkError with the command and what it says when it fails."""
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise BenchmarkError(f"{' '.join(command)}: {said}")
    return done.stdout


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that arrive inside wait until it is left."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_STOPS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
