"""Everything that needs GPUs, on the machine at hand, in one command, and its table.

    python -m benchmarks.gpu -o gpu.md                   with any number of GPUs; what needs more is named as skipped
    python -m benchmarks.gpu --parts steps dropout       some of it
    python -m benchmarks.gpu --device cpu --small        does the command itself work?

tests      every test that needs a GPU: one rank, ranks that share a GPU, NCCL with 2 and 4 ranks, whole lives of runs
prepared   examples/prepared.py on two ranks that share a GPU, and on a rank for each
steps      a rank's step beside the plain model's, which it should match within 2 %
dropout    what each dropout costs, beside torch's own
norms      what synchronised BatchNorm costs, beside torch's BatchNorm, without its messages
compiled   the steps once more, under torch.compile

Each part goes on after one that failed.  The exit status is 1 when something failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from tabulate import tabulate

from benchmarks import gpu_steps
from benchmarks.gpu_steps import LARGE, SMALL, Row, Scale
from splitc.runtime.launch.torchrun import torchrun
from splitc.version import __version__

ROOT = Path(__file__).resolve().parents[1]
MARK = "mark.gpu"


@dataclass(frozen=True)
class Machine:
    """Where the parts run: on the first GPU, with `gpus` of them, or on the CPU."""

    device: torch.device
    gpus: int
    scale: Scale

    def __str__(self) -> str:
        if not self.gpus:
            return "a CPU, which says nothing of GPUs"
        names = [torch.cuda.get_device_name(k) for k in range(self.gpus)]
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        nccl: Any = torch.cuda.nccl.version()
        return f"{kinds}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}"


Part = Callable[[Machine], Iterator[Row]]


@contextmanager
def seeing(devices: str | None) -> Iterator[None]:
    """Processes that are started see these GPUs only; None: all that this one sees."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    if devices is not None:
        os.environ[name] = devices
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def tests(machine: Machine) -> Iterator[Row]:
    """The outcome of every test that is marked, in files that have the mark."""
    files = sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text())
    with tempfile.TemporaryDirectory() as folder, seeing(None if machine.gpus else ""):
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu", "-n", "0", "-q", "--tb", "short", f"--junitxml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False)
        yield from outcomes(report.read_text(encoding="utf-8"))


def outcomes(report: str) -> Iterator[Row]:
    """A row for each test of a JUnit report; tests that were skipped for the same reason share one."""
    skipped: dict[str, int] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name, seconds = case.get("name", ""), float(case.get("time", 0))
        bad = [each for each in case if each.tag in ("failure", "error")]
        left_out = case.find("skipped")
        if bad:
            yield Row("tests", name, f"{bad[0].tag}: {first_line(bad[0].get('message', ''))}", "passes", False)
        elif left_out is not None:
            reason = left_out.get("message", "")
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            yield Row("tests", name, f"{seconds:.0f} s", "passes", True)
    for reason, number in skipped.items():
        yield Row("tests", f"{number} skipped", reason)


def prepared(machine: Machine) -> Iterator[Row]:
    """The example trains: its loss falls from epoch to epoch."""
    shared = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if machine.gpus else ""
    runs: list[tuple[int, str | None, str]] = [(2, shared, "two ranks that share a device")]
    if machine.gpus > 1:
        runs.append((min(machine.gpus, 4), None, "a GPU for each rank"))
    for world, devices, what in runs:
        with seeing(devices):
            done = torchrun([str(ROOT / "examples" / "prepared.py")], world, quiet=True)
        losses = [float(number) for number in re.findall(r"^epoch \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]
        falls = len(losses) > 1 and all(later < before for before, later in pairwise(losses))
        got = ", ".join(map(str, losses)) if not done.returncode else f"failed: {first_line(done.stderr)}"
        lines = [line for line in done.stdout.splitlines() + done.stderr.splitlines() if " ranks " in line]
        yield Row("prepared", what, "; ".join([got, *lines[:1]]), "a loss that falls", not done.returncode and falls)


def _on_device(rows: gpu_steps.Rows) -> Part:
    return lambda machine: rows(machine.device, machine.scale)


PARTS: dict[str, Part] = {
    "tests": tests,
    "prepared": prepared,
    **{name: _on_device(rows) for name, rows in gpu_steps.PARTS.items()},
}


def measured(machine: Machine, parts: Sequence[str]) -> Iterator[Row]:
    """The rows of these parts; a part that fails has a row that says why."""
    for name in parts:
        try:
            yield from PARTS[name](machine)
        except Exception as error:  # the others are still worth having
            yield Row(name, "the part itself", f"{type(error).__name__}: {first_line(str(error))}", "", False)


def first_line(text: str) -> str:
    """The first line of a message that says something, without what would end a cell of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else "no message").replace("|", "/")[:200]


def page(machine: Machine, rows: Sequence[Row]) -> str:
    """The table as markdown, under what was measured and when; what failed comes first."""
    failed = [row for row in rows if row.ok is False]
    verdicts = {True: "yes", False: "NO", None: ""}
    table = [(row.part, row.what, row.got, row.wanted, verdicts[row.ok]) for row in rows]
    headers = ("part", "what", "got", "wanted", "holds")
    return "\n".join(
        [
            f"{datetime.date.today().isoformat()}: {machine}; torch {torch.__version__}, splitc {__version__}.",
            f"{len(failed)} of {sum(row.ok is not None for row in rows)} failed"
            + "".join(f"; {row.part}: {row.what}" for row in failed)
            + ".\n",
            tabulate(table, headers, tablefmt="github", disable_numparse=True),
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, print each row as it comes, and write the page after each."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="write the table there, as markdown")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try the command")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="tiny models, whose figures say nothing")
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count() if args.device == "cuda" and torch.cuda.is_available() else 0
    if args.device == "cuda" and not gpus:
        print("torch sees no GPU here, so nothing was measured; --device cpu --small tries the command itself")
        return 2
    machine = Machine(torch.device("cuda", 0) if gpus else torch.device("cpu"), gpus, SMALL if args.small else LARGE)
    rows: list[Row] = []
    for row in measured(machine, args.parts):
        rows.append(row)
        print(f"{row.part}: {row.what}: {row.got}{' - FAILED' * (row.ok is False)}", flush=True)
        if args.output is not None:
            args.output.write_text(page(machine, rows), encoding="utf-8")
    print(f"\n{page(machine, rows)}", end="")
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
