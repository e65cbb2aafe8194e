"""The bytes that each rank really sends in a training step, beside those that its program is defined to send.

    python -m benchmarks.wire_bytes --strategies data_parallel layer_separation --world 2 3 4

Compiles each plan, runs its generated programs with gloo on a testbed, and reads the kernel's counters of each rank's
link before and after a few steps: connections, the first steps and all other traffic cancel out.

    defined    what `splitc.ir.wire.wire` says that the rank sends, summed
    counted    what the rank's own program counted, `rank.sent_bytes`
    measured   what passed the rank's link: whole frames of at most 9000 bytes, with the headers of Ethernet, IP and
               TCP, and with its acknowledgements of what it received; that makes about 1 % of the bytes

The measured bytes must be within 5 % and 64 KiB of the defined ones, per rank and step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.errors import BenchmarkError
from benchmarks.layout import parse_rates
from benchmarks.lockstep import Lockstep
from benchmarks.testbed import NetworkTestbed
from splitc.cli.model_file import load_model
from splitc.cli.options import positive
from splitc.compiled import CompiledProgram, compile_example
from splitc.errors import SplitcError
from splitc.ir.wire import wire
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings

ROOT = Path(__file__).resolve().parents[1]
MODEL = "benchmarks/models/alexnet_quarter.py"
STRATEGIES = ("data_parallel", "layer_separation")
TOLERANCE, SLACK = 0.05, 64 * 1024  # fraction of the defined bytes, and bytes
MTU = 9000
QUIET = 0.1  # seconds from the last rank's mark to the reading; acknowledgements arrive meanwhile


@dataclass(frozen=True)
class Case:
    """One plan to measure: a model argument as `splitc compile` takes it, a strategy in its text form, a world."""

    model: str
    strategy: str
    world: int


@dataclass(frozen=True)
class Sent:
    """What one rank sends in one step, in bytes."""

    case: Case
    rank: int
    roles: tuple[str, ...]
    defined: float
    counted: float
    measured: float

    @property
    def within(self) -> bool:
        return abs(self.measured - self.defined) <= TOLERANCE * self.defined + SLACK


def measure(case: Case, compiled: CompiledProgram, steps: int, rate: float | list[float] | None = None) -> list[Sent]:
    """Run a compiled program on a testbed, and return what each of its ranks sends.

    steps: at least; where ranks train in rounds, whole rounds are run.
    Raises BenchmarkError when there can be no testbed, or a rank fails.
    """
    ranks, of_round = range(case.world), compiled.plan.rounds.steps if compiled.plan.rounds else 1
    steps = -(-steps // of_round) * of_round
    with (
        tempfile.TemporaryDirectory(prefix="wire-bytes-") as name,
        NetworkTestbed(case.world, rate, mtu=MTU) as testbed,
    ):
        folder = compiled.save(Path(name) / "build")
        logs = [Path(name) / f"rank{rank}.log" for rank in ranks]
        command = [sys.executable, "-m", "benchmarks.wire_rank", str(folder)]
        command += ["--world", str(case.world), "--steps", str(steps)]
        processes = []
        for rank, log in enumerate(logs):
            with log.open("wb") as errors:
                pipe = subprocess.PIPE
                processes.append(testbed.start(rank, command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=errors))
        lockstep = Lockstep(processes, logs)
        warm = lockstep.hear("warm")
        before = _read(testbed)
        lockstep.go_on()
        done = lockstep.hear("done")
        after = _read(testbed)
        lockstep.go_on()
    plan, program = compiled.plan, compiled.program
    return [
        Sent(
            case,
            rank,
            next((roles for roles, members in plan.ranks_by_roles.items() if rank in members), ()),
            sum(op.per_step for op in wire(program, rank)),
            (done[rank]["sent"] - warm[rank]["sent"]) / steps,
            (after[rank] - before[rank]) / steps,
        )
        for rank in ranks
    ]


def _read(testbed: NetworkTestbed) -> list[int]:
    """The counters, while every rank stands at a mark.  All have received all that was sent to them by then."""
    time.sleep(QUIET)
    return [testbed.bytes_sent(rank) for rank in range(testbed.world)]


def table(rows: Sequence[Sent]) -> str:
    """The figures of all ranks, one line for each."""
    return tabulate(
        [
            (
                f"{Path(row.case.model).stem} {row.case.strategy}, {row.case.world} ranks",
                row.rank,
                ", ".join(row.roles) or "-",
                f"{row.defined:,.0f}",
                f"{row.counted:,.0f}",
                f"{row.measured:,.0f}",
                f"{row.measured / row.defined:.4f}" if row.defined else "-",
                "yes" if row.within else "NO",
            )
            for row in rows
        ],
        headers=("plan", "rank", "role", "defined", "counted", "measured", "measured/defined", "within 5 % + 64 KiB"),
        colalign=("left", "right", "left", "right", "right", "right", "right", "left"),
        disable_numparse=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all plans and print the table.  1 when a rank is out of bounds or a plan was not measured, else 0."""
    args = _parser().parse_args(argv)
    rows: list[Sent] = []
    problems: list[str] = []
    try:
        rate = None if args.rate is None else parse_rates(args.rate)
        for model in args.models:
            file = load_model(model, args.input)
            for case in (Case(model, strategy, world) for strategy in args.strategies for world in args.world):
                print(f"{case.model} {case.strategy}, {case.world} ranks", file=sys.stderr, flush=True)
                try:
                    settings = Settings(case.world, cluster=args.cluster, strategy=parse_strategy(case.strategy))
                    compiled = compile_example(file.model, file.example, settings, name=file.name)
                except SplitcError as error:
                    problems.append(f"{case.model} {case.strategy}, {case.world} ranks: {error}")
                    continue
                rows += measure(case, compiled, args.steps, rate)
    except (BenchmarkError, SplitcError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if rows:
        print(f"bytes sent per step, mean of {args.steps} steps; frames of at most {MTU} bytes, headers included\n")
        print(table(rows))
    for problem in problems:
        print(f"not measured: {problem}")
    return 1 if problems or not all(row.within for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire_bytes",
        description="Measure the bytes that each rank sends in a training step, beside those it is defined to send.",
        epilog="exit codes: 0 all are within 5 % + 64 KiB; 1 a rank is not, or a plan could not be compiled; "
        "2 it could not be run",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--models", nargs="+", default=[MODEL], metavar="MODEL", help=f"as for splitc compile (default: {MODEL})"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=list(STRATEGIES),
        metavar="STRATEGY",
        help=f"as for splitc compile (default: {' '.join(STRATEGIES)})",
    )
    parser.add_argument(
        "--world", nargs="+", type=positive, default=[2, 3, 4], metavar="N", help="numbers of ranks (default: 2 3 4)"
    )
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="steps that are counted (default: 5)")
    parser.add_argument("--input", metavar="SIZES", help="an example of these sizes, as for splitc compile")
    parser.add_argument(
        "--cluster", default="v100-10gbe", metavar="NAME", help="what plans are made for (default: v100-10gbe)"
    )
    parser.add_argument(
        "--rate",
        default="800Mbit",
        help="of each rank's link, below what loses frames: 230Mbit, or one for each rank: 230Mbit,100Mbit "
        "(default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
