"""Do four hosts that lose one, and get it back, train as four that did not?

    python -m benchmarks.faults --worlds            three losses at once, about four minutes

Each host has a network namespace.  One is lost in the middle of a step: its cable is pulled, so that nobody gets a RST,
its processes are killed, its namespace is removed.  A while later it is back, as a machine that has started anew.
`splitc run --hosts a,b,c,d --min-world 2` goes on by itself; SPLITC_TIMEOUT is that of a user, 120 s.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from benchmarks.errors import BenchmarkError
from benchmarks.testbed import NetworkTestbed
from splitc.runtime.launch.torchrun import end_tree
from splitc.runtime.worker import Worker
from tests.support import worlds

WORLD, STEPS, AFTER = 4, 420, 30  # hosts; steps of a run, and those before a host is lost
PAUSE = 0.15  # seconds by which a forward is longer
AWAY = 8.0  # seconds that the others train, before the host is back
LIMIT = 90.0  # seconds that a change of the world may take
ENOUGH = 1e-5  # of a parameter's difference
LOSSES = ("layer_separation", 3), ("data_parallel", 0), ("data_parallel", 2)
"""Strategy, and the host that is lost; the first one has the store of the ranks."""

_SSH = """\
#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
address=$1; shift
case $address in {cases} esac
lost={folder}/lost-$host
if [ -e $lost ]; then
    sleep 10; echo "ssh: connect to host $address port 22: Connection timed out" >&2; exit 255
fi
cd "$HOME"; ip netns exec $host sh -c "$*"; code=$?
[ -e $lost ] || exit $code
sleep 15; echo "Timeout, server $address not responding." >&2; exit 255
"""
"""A stand-in for ssh: it runs a command in the namespace of a host; of one that is lost it hears as ssh does, late."""


@dataclass
class Change:
    """How a run went on.  until_three, until_four: seconds from the loss, and from the return, to a step of so many."""

    strategy: str
    host: int
    until_three: float = 0.0
    until_four: float = 0.0
    undone: int = 0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)
    text: str = ""


def data(worker: Worker) -> Any:
    """The examples; the first forward of a step takes longer, where hosts may be lost."""
    begun: list[int] = []

    def pause(*_: Any) -> None:
        if begun:
            begun.clear()
            time.sleep(PAUSE)

    if "SPLITC_MIN_WORLD" in os.environ:
        register_module_forward_pre_hook(pause)
    return worlds.noting(worker, begun.append)


def made(folder: Path) -> list[tuple[int, int]]:
    """World and step of all that were begun, in their order, as the first reader noted them."""
    with suppress(OSError):
        lines = (folder / "seen-0").read_text().splitlines()
        return [(line["world"], line["step"]) for line in map(json.loads, lines)]
    return []


class Worlds:
    """Runs in folders of their own.  python: starts processes."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python

    def undisturbed(self, strategy: str) -> Path:
        """Compile with the ladder, and train without a loss; returns the folder of the build and of the run."""
        folder = self.folder / strategy
        worlds.program(strategy).save(folder / "build", min_world=2)
        (folder / "cwd").mkdir(parents=True)
        with NetworkTestbed(1) as testbed, (folder / "log").open("wb") as log:
            command = ["ip", "netns", "exec", testbed.layout.namespace(0), *self._command(folder / "build", folder)]
            env = {**os.environ, worlds.FOLDER: str(folder), "HOME": str(folder)}
            code = subprocess.run(command, env=env, stdout=log, stderr=log, cwd=folder / "cwd", check=False).returncode
        if code:
            raise BenchmarkError(f"{strategy}, undisturbed: exit status {code}\n{(folder / 'log').read_text()}")
        return folder

    def change(self, strategy: str, host: int) -> Change:
        """Lose a host of a run, and bring it back."""
        change, whole, folder = Change(strategy, host), self.folder / strategy, self.folder / f"{strategy}-{host}"
        for name in ("bin", "cwd", "home", "run"):
            (folder / name).mkdir(parents=True)
        with NetworkTestbed(WORLD) as testbed, (folder / "log").open("wb") as log:
            self._stand_in(folder, testbed)
            options = ["--hosts", ",".join(map(testbed.layout.address, range(WORLD))), "--restarts", "1"]
            options += ["--min-world", "2", "--save-every", "20", "--checkpoints", str(folder / "run")]
            env = {**os.environ, worlds.FOLDER: str(folder), "HOME": str(folder / "home")}
            env["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
            process = subprocess.Popen(
                [*self._command(whole / "build", folder), *options],
                env=env, stdout=log, stderr=log, cwd=folder / "cwd", start_new_session=True,
            )  # fmt: skip
            try:
                self._lose(testbed, folder, change)
                if process.wait(LIMIT + STEPS * PAUSE):
                    change.problems.append(f"exit status {process.returncode}")
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                change.problems.append(f"NO END: {error}")
            end_tree(process)
        change.text = (folder / "log").read_text(errors="replace")
        if not change.problems:
            self._compare(whole, folder, change)
        return change

    def _command(self, build: Path, folder: Path) -> list[str]:
        options = ["--data", "benchmarks.faults_worlds:data", "--steps", str(STEPS), "--save", str(folder / "end.pt")]
        return [str(self.python), "-m", "splitc.cli", "run", str(build), *options]

    def _stand_in(self, folder: Path, testbed: NetworkTestbed) -> None:
        names = {testbed.layout.address(k): testbed.layout.namespace(k) for k in range(WORLD)}
        cases = " ".join(f"{address}) host={name} ;;" for address, name in names.items())
        (folder / "bin" / "ssh").write_text(_SSH.format(cases=cases, folder=folder))
        (folder / "bin" / "ssh").chmod(0o755)

    def _lose(self, testbed: NetworkTestbed, folder: Path, change: Change) -> None:
        """Lose a host at a moment of a step, and bring it back once the others have trained for a while."""
        lost = folder / f"lost-{testbed.layout.namespace(change.host)}"

        def until(world: int, step: int = 0) -> float:
            end = time.monotonic() + LIMIT
            while (begun := [*made(folder), (0, 0)][-2:][0])[0] != world or begun[1] < step:
                if time.monotonic() > end:
                    raise TimeoutError(f"no step of {world} ranks within {LIMIT:.0f} s")
                time.sleep(0.02)
            return time.monotonic()

        until(WORLD, AFTER)
        time.sleep(random.Random(f"{change}").random() * PAUSE)
        lost.touch()
        begin = time.monotonic()
        testbed.lose(change.host)
        change.until_three = until(WORLD - 1) - begin
        time.sleep(AWAY)
        testbed.bring_back(change.host)
        lost.unlink()
        begin = time.monotonic()
        change.until_four = until(WORLD) - begin

    def _compare(self, whole: Path, folder: Path, change: Change) -> None:
        """Note which examples or parameters are not those of the undisturbed run."""
        parts = [(world, [step for _, step in part]) for world, part in groupby(made(folder), lambda each: each[0])]
        if [world for world, _ in parts] != [WORLD, WORLD - 1, WORLD]:
            change.problems.append(f"the worlds were {[world for world, _ in parts]}")
            return
        change.undone = sum(before[-1] - after[0] + 1 for (_, before), (_, after) in pairwise(parts))
        world_of = {step: world for world, steps in parts for step in steps}
        given, wanted = worlds.seen(folder), worlds.seen(whole)
        others = [step for step in range(1, STEPS + 1) if given[world_of[step], step] != wanted[WORLD, step]]
        change.problems += [f"other examples in steps {others}"] * bool(others)
        final, expected = (torch.load(each / "end.pt", weights_only=True) for each in (folder, whole))
        change.worst = max((final[name] - expected[name]).abs().max().item() for name in expected)
        change.problems += ["other parameters"] * (change.worst > ENOUGH)


def table(folder: Path, python: Path) -> int:
    """Print how each loss went, and what the runs of others printed; exit status 1 where one has a problem."""
    runs = Worlds(folder, python)
    for strategy in dict.fromkeys(strategy for strategy, _ in LOSSES):
        runs.undisturbed(strategy)
    print("| strategy | host lost | until 3 train | until 4 train | steps again | difference | problems |")
    print("|---|--:|--:|--:|--:|--:|---|", flush=True)
    with ThreadPoolExecutor(len(LOSSES)) as pool:
        changes = [*pool.map(lambda loss: runs.change(*loss), LOSSES)]
    for each in changes:
        times = f"{each.until_three:.1f} s | {each.until_four:.1f} s | {each.undone} | {each.worst:.1e}"
        print(f"| `{each.strategy}` | {each.host} | {times} | {'; '.join(each.problems) or '-'} |")
        if each.problems:
            print(each.text, file=sys.stderr)
    return int(any(each.problems for each in changes))
