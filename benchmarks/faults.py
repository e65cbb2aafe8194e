"""Does a run on four ranks that meets a fault end as if it had not?

    python -m benchmarks.faults                     pairwise, at least 80 runs, a row of a table each
    python -m benchmarks.faults --all               the product
    python -m benchmarks.faults --sample 30         some of it that the pairwise ones do not hold
    python -m benchmarks.faults --every 30 --for 600   a rank is killed every 30 s for 600 s
    python -m benchmarks.faults --worlds            a host of four is lost, and comes back: `faults_worlds`

Each run is `splitc run --restarts 5`; a rank meets one fault, once, at its fifth step or in the checkpoint or
evaluation after it.  Exit status 1 when a run does not end with the parameters of the undisturbed one, bit for bit,
stands still for more than 60 s, or leaves a process or a file behind.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import combinations, product
from pathlib import Path
from re import findall

import torch
import torch.nn.functional as F

import splitc
from benchmarks import faults_worlds
from benchmarks.faults_rank import PAUSE, images
from benchmarks.load import processes
from benchmarks.session import ROOT
from benchmarks.testbed import NetworkTestbed
from splitc.runtime.launch.torchrun import end_tree
from tests.support.every_strategy import Small
from tests.support.forked import program

WORLD, STEPS, RESTARTS = 4, 8, 5
LIMIT, STILL = 40.0, 60.0  # seconds that a start may take, and from a fault to the next start
GRACE = 12.0  # seconds that processes may take to be gone; a host's watcher sleeps for 10
SLOW = 32e3  # bytes/s of a slow line
PLACES = {
    "data_parallel": {"reader": 2},
    "hybrid_single": {"conv": 1, "fc": 0},
    "late_multiply": {"reader": 1},
    "layer_separation(ranks=2+1+1)": {"conv": 0, "fc": 2, "head": 3},
    "modulo_shard(mp=2)": {"shard": 3},
    "parameter_server(servers=1)": {"reader": 0, "server": 3},
}
"""strategy -> kind of rank -> the rank of this kind that meets a fault."""
FAULTS = "kill", "stop", "exception", "cut line", "slow line", "disk full", "torn file"
MOMENTS = "start", "forward", "exchange", "optimizer", "checkpoint", "evaluation"


@dataclass(frozen=True)
class Cell:
    """A run: what the rank of a kind meets."""

    fault: str
    strategy: str
    kind: str
    moment: str

    @property
    def is_possible(self) -> bool:
        """Disks are written to in checkpoints alone; a server has no forward, and updates what its workers have not."""
        of_disk = self.fault in ("disk full", "torn file")
        missing = {"server": "forward", "reader": "optimizer" * self.strategy.startswith("parameter_server")}
        return (not of_disk or self.moment == "checkpoint") and missing.get(self.kind) != self.moment


@dataclass
class Row:
    """What came of a run.  still: seconds from the fault to the next start.  text: of the run."""

    outcome: str = "same"
    starts: int = 1
    still: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    text: str = ""


def cells(every: bool, least: int) -> list[Cell]:
    """All that are possible; or of these, in a fixed order, few that have every pair, and others up to `least`."""
    places = [(strategy, kind) for strategy, kinds in PLACES.items() for kind in kinds]
    found = [Cell(fault, *place, moment) for fault, place, moment in product(FAULTS, places, MOMENTS)]
    found = [cell for cell in found if cell.is_possible]
    random.Random(0).shuffle(found)

    def pairs(cell: Cell) -> set[object]:
        return set(combinations(enumerate(astuple(cell)), 2))

    left, chosen = set().union(*map(pairs, found)), list[Cell]()
    while left and not every:
        chosen.append(max(found, key=lambda cell: len(left & pairs(cell))))
        left -= pairs(chosen[-1])
    rest = [cell for cell in found if cell not in chosen]
    return chosen + rest[: len(rest) if every else max(0, least - len(chosen))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--sample", type=int, metavar="N", help="N combinations, drawn of those that are not pairwise")
    parser.add_argument("--runs", type=int, help="only the first so many")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="those whose row has these words")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--timeout", default="6", help="seconds that a wait may take (SPLITC_TIMEOUT, default 6)")
    parser.add_argument("--every", type=float, help="kill a rank every so many seconds")
    parser.add_argument("--for", type=float, dest="length", default=600.0, help="seconds of --every (default 600)")
    parser.add_argument("--worlds", action="store_true", help="four hosts lose one, and get it back")
    parser.add_argument("--texts", action="store_true", help="print what the runs printed, not only of those that fail")
    args = parser.parse_args(argv)
    os.environ.update(SPLITC_TIMEOUT=args.timeout, OMP_NUM_THREADS="1", SPLITC_CACHE="off", SPLITC_ADVICE="0")
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory(prefix="splitc-faults-") as name, program(Path(name)) as python:
        campaign = Campaign(Path(name), python)
        if args.every:
            return campaign.killed(args.every, args.length)
        if args.worlds:
            del os.environ["SPLITC_TIMEOUT"]
            return faults_worlds.table(Path(name), python)
        chosen = cells(args.all or args.sample is not None, 80)
        if args.sample is not None:
            pairwise = cells(False, 80)
            chosen = [cell for cell in chosen if cell not in pairwise][: args.sample]
        chosen = chosen[: args.runs]
        chosen = [cell for cell in chosen if {*args.only} <= {*astuple(cell)}]
        for strategy in sorted({cell.strategy for cell in chosen}):
            campaign.prepare(strategy)
        print("| fault | strategy | rank | moment | parameters | starts | stood still | run | problems |", flush=True)
        print("|---|---|---|---|---|--:|--:|--:|---|", flush=True)
        rows = []
        with ThreadPoolExecutor(args.jobs) as pool:
            running = {pool.submit(campaign.row, cell): cell for cell in chosen}
            for done in as_completed(running):
                cell, row = running[done], done.result()
                where = f"{cell.kind}, {PLACES[cell.strategy][cell.kind]}"
                times = f"{row.starts} | {row.still:.1f} s | {row.seconds:.1f} s"
                parts = cell.fault, f"`{cell.strategy}`", where, cell.moment, row.outcome, times
                print(f"| {' | '.join(parts)} | {'; '.join(row.problems) or '-'} |", flush=True)
                rows.append(row)
                if args.texts or row.problems:
                    print(f"{cell}\n{row.text}", file=sys.stderr, flush=True)
        good = sum(not row.problems for row in rows)
        print(f"\n{good} of {len(rows)} runs end as promised; the longest stood still for "
              f"{max(row.still for row in rows):.1f} s")  # fmt: skip
        return 0 if good == len(rows) else 1


class Campaign:
    """Runs in folders of their own.  python: starts processes."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python = folder, python
        self.numbers, self.final = iter(range(10**6)), dict[str, dict[str, torch.Tensor]]()

    def prepare(self, strategy: str, steps: int = STEPS, *more: int) -> None:
        """Compile, and train undisturbed."""
        torch.manual_seed(0)
        inputs, target = images(8)
        made = splitc.compile(
            Small(), WORLD, (inputs,), target, F.cross_entropy, strategy=strategy, cluster="v100-10gbe"
        )
        made.save(self.folder / "builds" / strategy)
        row, folder = self.run(strategy, steps, "||", *more)
        if row.outcome != "same" or row.problems:
            raise SystemExit(f"{strategy}, undisturbed: {row.outcome} {row.problems}\n{row.text}")
        self.final[strategy] = torch.load(folder / "final.pt", weights_only=True)

    def row(self, cell: Cell) -> Row:
        rank = PLACES[cell.strategy][cell.kind]
        row, folder = self.run(cell.strategy, STEPS, f"{cell.fault}|{rank}|{cell.moment}")
        if row.outcome == "same" and not self.same(cell.strategy, folder):
            row.outcome = "OTHERS"
        if row.outcome != "same":
            row.problems.append(row.outcome)
        if not (folder / "planted").exists():
            row.problems.append("the fault was not met")
        elif (folder / "again").exists():
            row.still = (folder / "again").stat().st_mtime - (folder / "planted").stat().st_mtime
        if row.still > STILL:
            row.problems.append(f"stood still for more than {STILL:.0f} s")
        return row

    def same(self, strategy: str, folder: Path) -> bool:
        final, wanted = torch.load(folder / "final.pt", weights_only=True), self.final[strategy]
        return final.keys() == wanted.keys() and all(torch.equal(final[name], wanted[name]) for name in wanted)

    def run(self, strategy: str, steps: int, fault: str, restarts: int = RESTARTS, save: int = 2) -> tuple[Row, Path]:
        """A run of `splitc run`, on four hosts where the fault is of a line."""
        folder, build = self.folder / f"run-{next(self.numbers)}", self.folder / "builds" / strategy
        for name in ("disk", "cwd", "home", "tmp"):
            (folder / name).mkdir(parents=True)
        options = ["--data", "benchmarks.faults_rank:data", "--eval-data", "benchmarks.faults_rank:held_out"]
        options += ["--eval-every", str(save), "--save-every", str(save), "--steps", str(steps)]
        options += ["--checkpoints", str(folder / "disk" / "run"), "--save", str(folder / "final.pt")]
        command = [str(self.python), "-m", "splitc.cli", "run", str(build), "--restarts", str(restarts), *options]
        own = {"FAULT": f"{folder}|{fault}", "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        before, begin, row = listed(build), time.monotonic(), Row()
        with NetworkTestbed(WORLD) as testbed, (folder / "log").open("wb") as log, line(testbed, folder, fault):
            names = testbed.layout.namespaces
            if "line" in fault:
                command += ["--hosts", ",".join(map(testbed.layout.address, range(WORLD)))]
                own["PATH"] = f"{stand_in_for_ssh(folder, testbed)}:{os.environ['PATH']}"
            else:
                apart = f'mount -t tmpfs -o size=2m disk {folder / "disk"} && exec "$@"'
                command = ["ip", "netns", "exec", names[1], "sh", "-c", apart, "sh", *command]
            process = subprocess.Popen(
                command, cwd=folder / "cwd", env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(LIMIT * restarts)
                row.outcome = "same" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                row.outcome = "NO END"
            until = time.monotonic() + GRACE
            while (left := processes(*names)) and time.monotonic() < until:
                time.sleep(0.2)
            row.problems += [f"orphans: {' '.join(left.values())}"] * bool(left)
            end_tree(process)
        row.seconds, row.text = time.monotonic() - begin, (folder / "log").read_text(errors="replace")
        row.starts += row.text.count("\nrestart ")
        others = listed(folder / "cwd") | listed(folder / "tmp") | listed(build) - before
        row.problems += [f"files: {' '.join(sorted(others)[:4])}"] * bool(others)
        return row, folder

    def killed(self, every: float, length: float) -> int:
        """Kill a rank, drawn anew, every so many seconds while a run trains; print how much of the time it trained."""
        strategy, steps = "layer_separation(ranks=2+1+1)", int(length / PAUSE * 0.6)
        restarts = int(length / every) + RESTARTS
        self.prepare(strategy, steps, restarts, 20)
        os.environ.update(FAULT_EVERY=str(every), FAULT_UNTIL=str(time.time() + length))
        row, folder = self.run(strategy, steps, "||", restarts, 20)
        made = dict(findall(r"(?m)^step (\d+)  loss \S+  (\S+) s", row.text))  # a step that was made twice counts once
        same = row.outcome == "same" and self.same(strategy, folder)
        share = sum(map(float, made.values())) / row.seconds
        print(f"{row.starts} starts, {steps} steps in {row.seconds:.0f} s, {share:.0%} of them "
              f"training; the same parameters: {same}; {row.problems}")  # fmt: skip
        if not same:
            print(row.text)
        return 0 if same and not row.problems else 1


@contextmanager
def line(testbed: NetworkTestbed, folder: Path, fault: str) -> Iterator[None]:
    """Cut or slow down the line of a rank when it asks for it; what is cut is mended for the next start."""
    over, rank = threading.Event(), fault.split("|")[1]

    def watch() -> None:
        while not (folder / "planted").exists():
            if over.wait(0.05):
                return
        if not fault.startswith("cut"):
            testbed.set_rate([SLOW if fault.startswith("slow") and str(k) == rank else None for k in range(WORLD)])
            return
        testbed.unplug(int(rank))
        while "\nrestart " not in (folder / "log").read_text(errors="replace") and not over.wait(0.05):
            pass
        testbed.plug(int(rank))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def stand_in_for_ssh(folder: Path, testbed: NetworkTestbed) -> Path:
    """The folder of an `ssh` that runs the command in the namespace of the rank that has the address."""
    names = {testbed.layout.address(rank): testbed.layout.namespace(rank) for rank in range(WORLD)}
    cases = " ".join(f"{address}) host={name} ;;" for address, name in names.items())
    skip = 'while [ "$1" = -o ]; do shift 2; done'
    text = f'#!/bin/sh\n{skip}\ncase "$1" in {cases} esac\nshift\ncd "$HOME" && exec ip netns exec "$host" sh -c "$*"\n'
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(text)
    (folder / "bin" / "ssh").chmod(0o755)
    return folder / "bin"


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


if __name__ == "__main__":
    sys.exit(main())
