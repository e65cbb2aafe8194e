"""What do short numbers gain on a slow network?  The best exact plan beside the best one under a wire format.

Ranks on a testbed are calibrated; `auto`'s exact plan, the same plan with short numbers, and what `auto` takes under
the format run in turns, in an order drawn anew each time.  The kernel counts the bytes on each link.

    python -m benchmarks.short_wire                                     4 ranks, 60 Mbit/s, bf16
    python -m benchmarks.short_wire --world 11 --rate 82Mbit --wire activations=bf16,gradients=int8
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import splitc
from benchmarks.cases import Case
from benchmarks.layout import parse_rate
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc import units
from splitc.compiled import CompiledProgram, compile_example
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster
from splitc.ir.short_wire import parse_wire
from splitc.report.what_if import choice_text
from splitc.specialise import Settings


@dataclass
class Side:
    """A plan, and what its runs took: seconds of a step, and bytes that all links took from their ranks in it."""

    name: str
    compiled: CompiledProgram
    seconds: list[float] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.short_wire", description=splitc.__doc__)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--input", default="32x3x224x224", help="a rank's batch")
    parser.add_argument("--wire", default="bf16")
    parser.add_argument("--strategies", nargs="+", default=["auto", "data_parallel"])
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", default="60Mbit")
    parser.add_argument("--cpus", type=float, default=2.0, help="processors of all ranks")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to calibrate")
    parser.add_argument("--cluster", type=Path, help="calibrated before; it is not calibrated then")
    args = parser.parse_args(argv)
    rate, share = parse_rate(args.rate), args.cpus / args.world
    with (
        tempfile.TemporaryDirectory() as name,
        NetworkTestbed(args.world, rate, share) as testbed,
        Session(testbed) as session,
    ):
        text = args.cluster.read_text() if args.cluster else session.calibrate(args.budget)[0]
        sides = _sides(args, parse_cluster(text, "the calibrated cluster"))
        for k, side in enumerate(sides):
            session.load(str(k), side.compiled.save(Path(name) / str(k)))
        for number in range(args.rounds):
            for k in random.Random(number).sample(range(len(sides)), len(sides)):
                run = session.run(str(k), 2, 1)
                sides[k].seconds.append(run.step_seconds)
                sides[k].carried.append(sum(run.carried))
    print(f"{args.model} on {args.world} ranks, {args.rate}, {args.rounds} rounds")
    for first, side in ((sides[k - k % 3], side) for k, side in enumerate(sides)):
        gains = [a / b for a, b in zip(first.seconds, side.seconds, strict=True)]
        plan, carried = side.compiled.plan, statistics.median(side.carried)
        print(
            f"{side.name:32} {choice_text(plan):40} {units.seconds(side.step):>8}, "
            f"{plan.step_seconds / side.step - 1:+.1%}; {statistics.median(gains):.2f} times the exact plan "
            f"[{min(gains):.2f}, {max(gains):.2f}]; {units.nbytes(carried)} on the links, "
            f"{carried / statistics.median(first.carried):.3f} of its"
        )
    return 0


def _sides(args: argparse.Namespace, cluster: Cluster) -> list[Side]:
    """Of each strategy the exact plan, the same in short numbers, and the one that is chosen for them."""
    file, wire, sides = Case(args.model, args.input).file, parse_wire(args.wire), list[Side]()
    for strategy in args.strategies:
        exact = Settings(args.world, args.world * file.example.batch, cluster, strategy)
        made = compile_example(file.model, file.example, exact, name=args.model)
        same = compile_example(file.model, file.example, exact, name=args.model, plan=replace(made.plan, wire=wire))
        chosen = compile_example(file.model, file.example, replace(exact, wire=wire), name=args.model)
        names = strategy, f"{strategy}, the same in {args.wire}", f"{strategy} in {args.wire}"
        sides += [Side(name, each) for name, each in zip(names, (made, same, chosen), strict=True)]
    return sides


if __name__ == "__main__":
    sys.exit(main())
