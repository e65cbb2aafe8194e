"""What do unequal shares of sums gain where lines differ?  Data parallel with them beside the same plan on rings.

Ranks on a testbed are calibrated; both plans run in turns, in an order drawn anew each time.

    python -m benchmarks.unequal_lines
    python -m benchmarks.unequal_lines --rates 200Mbit 200Mbit 100Mbit 100Mbit
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.layout import parse_rate
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc import units
from splitc.compiled import compile_example
from splitc.ir.cluster_file import parse_cluster
from splitc.specialise import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal_lines")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--input", default="32x3x224x224", help="a rank's batch")
    parser.add_argument("--rates", nargs="+", default=["200Mbit", "200Mbit", "200Mbit", "50Mbit"])
    parser.add_argument("--cpus", type=float, default=2.0, help="processors of all ranks")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to calibrate")
    parser.add_argument("--shares", nargs="+", type=int, default=[], help="of the ranks, in place of those chosen")
    parser.add_argument("--cluster", type=Path, help="calibrated before; it is not calibrated then")
    args = parser.parse_args(argv)
    rates = [parse_rate(rate) for rate in args.rates]
    with (
        tempfile.TemporaryDirectory() as name,
        NetworkTestbed(len(rates), rates, args.cpus / len(rates)) as testbed,
        Session(testbed) as session,
    ):
        text = args.cluster.read_text() if args.cluster else session.calibrate(args.budget)[0]
        file = Case(args.model, args.input).file
        settings = Settings(
            len(rates), len(rates) * file.example.batch, parse_cluster(text, "the calibrated cluster"), "data_parallel"
        )
        chosen = compile_example(file.model, file.example, settings, name=args.model).plan
        shares = tuple(args.shares) or chosen.sum_shares
        made = [
            compile_example(file.model, file.example, settings, name=args.model, plan=replace(chosen, sum_shares=each))
            for each in ((), shares)
        ]
        for k, each in enumerate(made):
            session.load(str(k), each.save(Path(name) / str(k)))
        seconds: tuple[list[float], list[float]] = [], []
        carried = [0.0, 0.0]
        for number in range(args.rounds):
            for k in random.Random(number).sample(range(2), 2):
                run = session.run(str(k), 2, 1)
                seconds[k].append(run.step_seconds)
                print("shares" if k else "rings", units.seconds(run.step_seconds), flush=True)
                carried[k] = run.carried[min(range(len(rates)), key=rates.__getitem__)]
    print(f"{args.model}, data_parallel on {', '.join(args.rates)}, {args.rounds} rounds")
    for k, each in enumerate(made):
        step, said = statistics.median(seconds[k]), each.plan.prediction.simulated_seconds
        gains = [a / b for a, b in zip(seconds[0], seconds[k], strict=True)]
        print(
            f"{f'shares {[*shares]}' if k else 'rings':32} {units.seconds(step):>8}, said {units.seconds(said)} "
            f"({said / step - 1:+.1%}); {statistics.median(gains):.2f} times rings "
            f"[{min(gains):.2f}, {max(gains):.2f}]; {units.nbytes(carried[k])} from the slowest"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
