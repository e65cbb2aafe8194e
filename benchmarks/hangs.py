"""Does a hang name the rank and the line that cause it?

Ranks train a small model, and one of them hangs on purpose: it is stopped, loops in its dataset, leaves out a step or
an evaluation, or loses its cable in a network of namespaces.

    python -m benchmarks.hangs                     22 hangs, a line of a table each; exit status 1 when one is not named
    python -m benchmarks.hangs --only cut --pages  those of a kind, with what is printed
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from benchmarks.session import ROOT
from benchmarks.testbed import NetworkTestbed
from splitc.runtime.launch.torchrun import end_tree

WORLD = 4
LOOP = "hangs_rank.py", "(45|46)"  # the lines that a dataset loops in
OPENING = "training hangs: "
ABORTS = "stopped: rank "  # gloo does where sums of other sizes meet
LIMIT = 240.0  # seconds, after which a hang has not been told


@dataclass(frozen=True)
class Hang:
    """A hang to plant on a rank, at a step, and what the first line of the page must say."""

    kind: str
    strategy: str
    rank: int
    at: int = 12

    @property
    def named(self) -> str:
        """What the page has to name, as a pattern."""
        if self.kind == "loop":
            line = rf"{LOOP[0]}, line {LOOP[1]}, in __getitem__"
            return rf"rank {self.rank} has been in your code, after step {self.at}, .*\({line}\); "
        if self.kind.startswith("skip"):
            return rf": rank {self.rank} is in (step|worker)[^;]*; ranks "
        if self.kind == "cut" and self.rank == 0:
            return r"no word from 10\.77\.0\.1, where all meet"
        return rf"no word from rank {self.rank}: " + ("its line is cut" if self.kind == "cut" else "it is stopped")


HANGS = (
    *(Hang("stop", "data_parallel", rank) for rank in (0, 3)),
    *(Hang("stop", "layer_separation", rank, 5 + rank) for rank in (0, 2, 3)),
    Hang("stop", "modulo_shard", 1),
    *(Hang("loop", "data_parallel", rank) for rank in (0, 2)),
    Hang("loop", "layer_separation", 1, 8),
    Hang("loop", "late_multiply", 3, 20),
    Hang("loop", "modulo_shard", 0, 30),
    *(Hang("skip", "layer_separation", 3, at) for at in (7, 16, 25)),
    Hang("skip", "data_parallel", 3),
    *(Hang("skip evaluate", "layer_separation", 3, at) for at in (10, 20)),
    *(Hang("cut", "data_parallel", rank) for rank in (0, 2)),
    *(Hang("cut", "layer_separation", rank) for rank in (1, 3)),
    Hang("cut", "late_multiply", 1),
)


class Perceptron(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        third: Tensor = self.third(self.second(self.first(x).relu()).relu())
        return third


def main(argv: Sequence[str] | None = None) -> int:
    """Plant hangs, and print what was to be named and what was, after how many seconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hangs", description=splitc.__doc__)
    parser.add_argument("--only", help="hangs of this kind")
    parser.add_argument("--seconds", default="6", help="that a wait may take (default 6)")
    parser.add_argument("--pages", action="store_true", help="print the pages too")
    args = parser.parse_args(argv)
    chosen = [hang for hang in HANGS if args.only in (None, hang.kind)]
    right = 0
    print("| planted | strategy | rank, step | named | line | after |\n|---|---|---|---|---|--:|")
    with tempfile.TemporaryDirectory() as folder:
        builds = {name: _build(name, Path(folder) / name) for name in {hang.strategy for hang in chosen}}
        for hang in chosen:
            text, seconds = "", None
            while seconds is None:  # else the ranks did not find each other within so few seconds
                text, seconds = _planted(hang, builds[hang.strategy], args.seconds)
            is_named, line = (
                re.search(hang.named, text.partition("\n")[0]) is not None,
                _line(text, builds[hang.strategy]),
            )
            right += is_named and bool(line)
            cells = (hang.kind, hang.strategy, f"{hang.rank}, {hang.at}", "yes" if is_named else "NO", line or "NO")
            print(f"| {' | '.join(cells)} | {seconds:.0f} s |", flush=True)
            if args.pages or not is_named:
                print(text, flush=True)
    print(f"\n{right} of {len(chosen)} hangs name the rank and the line")
    return 0 if right == len(chosen) else 1


def _build(strategy: str, folder: Path) -> Path:
    torch.manual_seed(0)
    example = torch.randn(8, 64), torch.zeros(8, dtype=torch.long)
    splitc.compile(Perceptron(), WORLD, example[:1], example[1], F.cross_entropy, strategy=strategy).save(folder)
    return folder


def _planted(hang: Hang, build: Path, floor: str) -> tuple[str, float | None]:
    """The page that a hang prints, and seconds from its planting; None: it was not planted."""
    arguments = ["benchmarks.hangs_rank", str(build), hang.kind, str(hang.rank), str(hang.at)]
    own = {"SPLITC_TIMEOUT": floor, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if hang.kind == "cut":
        with NetworkTestbed(WORLD) as testbed:
            reading, writing = os.pipe()
            far = hang.rank == 0  # all others are on the far side of rank 0, which has the store: on hosts of their own
            for rank in range(WORLD):
                command, named = [sys.executable, "-m", *arguments], {"GROUP_RANK": f"{rank}"} if far else {}
                testbed.start(rank, command, own | named, cwd=ROOT, stdout=writing, stderr=writing)
            os.close(writing)
            with os.fdopen(reading, "rb") as output:
                unplug, end = lambda: testbed.unplug(hang.rank), lambda: deque(map(testbed.kill, range(WORLD)), 0)
                return _page(output, "stopped: " if far else OPENING, unplug, end)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), "-m"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        opening = ABORTS if (hang.kind, hang.strategy) == ("skip", "data_parallel") else OPENING
        return _page(process.stdout, opening, lambda: None, lambda: end_tree(process))
    finally:
        end_tree(process)


def _page(
    output: IO[bytes], opening: str, planted: Callable[[], object], end: Callable[[], object]
) -> tuple[str, float | None]:
    """The first page among lines of output.  planted: called when the hang begins.  end: ends a run that says none."""
    begun, seconds, page, others = 0.0, 0.0, list[str](), list[str]()
    timer = threading.Timer(LIMIT, end)
    timer.daemon = True
    timer.start()
    for raw in output:
        line = raw.decode(errors="replace").rstrip("\n")
        if page and not line.startswith("  "):
            break
        if page or line.startswith(opening):
            page.append(line)
            if len(page) == 1:
                seconds = time.monotonic() - begun
        elif line == "planted":
            begun = time.monotonic()
            planted()
        elif not re.match("step ", line):
            others.append(line)
    timer.cancel()
    return "\n".join(page or ["no page", *others[-90:]]), seconds if begun else None


def _line(page: str, build: Path) -> str:
    """The first line of the build, or of the ranks' script, that the page shows, if it stands there."""
    for name, number, text in re.findall(r"^    (\w+\.py), line (\d+)(?:, in \S+)?: (.*)$", page, re.MULTILINE):
        path = build / name if (build / name).exists() else ROOT / "benchmarks" / name
        if " ".join(path.read_text().splitlines()[int(number) - 1].split()) == text:
            return f"{name}:{number}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
