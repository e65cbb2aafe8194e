"""Does training say that the network has become slower, and which plan is faster then?

Ranks on a calibrated testbed train a model; in the middle of it every link drops to half its rate.

    python -m benchmarks.drift                           4 ranks, quarter AlexNet, 230 -> 115 Mbit/s at step 40
    python -m benchmarks.drift --model mlp --world 8
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import splitc
from benchmarks.cases import Case
from benchmarks.layout import parse_rate
from benchmarks.session import ROOT, Session
from benchmarks.session_rank import sgd
from benchmarks.testbed import NetworkTestbed
from splitc.compiled import CompiledProgram, compile_example
from splitc.specialise import Settings

WITHIN = 30  # steps, in which it has to be said


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and print what rank 0 says; exit status 1 when the drop was not reported in time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=splitc.__doc__)
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--input", default="32x3x64x64")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rate", default="230Mbit")
    parser.add_argument("--cpus", type=float, default=0.5)
    parser.add_argument("--at", type=int, default=40, help="the step at which links drop to half")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds to calibrate")
    parser.add_argument("--cluster", type=Path, help="calibrated before; it is not calibrated then")
    parser.add_argument("--rank", metavar="CLUSTER", help="be one of the ranks")
    args = parser.parse_args(argv)
    if args.rank is not None:
        _rank(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _drop(args, args.cluster or Path(folder) / "cluster.toml")


def _drop(args: argparse.Namespace, cluster: Path) -> int:
    rate, step, said, clock = parse_rate(args.rate), 0, list[tuple[int, str]](), list[float]()
    with NetworkTestbed(args.world, rate=rate, cpus=args.cpus) as testbed:
        if args.cluster is None:
            with Session(testbed) as session:
                cluster.write_text(session.calibrate(args.budget)[0])
        command = [sys.executable, "-m", "benchmarks.drift", "--rank", str(cluster), *sys.argv[1:]]
        first, *_ = [
            testbed.start(rank, command, cwd=ROOT, stdout=subprocess.PIPE if rank == 0 else None, stderr=None)
            for rank in range(args.world)
        ]
        assert first.stdout is not None
        for raw in first.stdout:
            line = raw.decode().strip()
            if line.startswith("made "):
                step, clock = int(line.split()[1]), [*clock, time.perf_counter()]
                if step % 10 == 0:
                    print(f"{step:4}  {(clock[-1] - clock[-10]) / 9 * 1e3:.0f} ms a step", flush=True)
                if step == args.at:
                    testbed.set_rate(rate / 2)
            else:
                said.append((step, line))
                print(f"{step:4}  {line}", flush=True)
        first.wait()
    told = [step for step, line in said if step > args.at and ("run at" in line or "runs at" in line)]
    other = [step for step, line in said if step > args.at and "plan" in line]
    for what, found in (("the drop", told), ("a plan", other)):
        print(f"{what}: {f'after {found[0] - args.at} steps' if found else 'not reported'}")
    return 0 if told and other and told[0] - args.at <= WITHIN else 1


def _rank(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    sys.stderr = sys.stdout  # in one order
    torch.manual_seed(0)
    file = Case(args.model, args.input).file
    settings = Settings(args.world, None, args.rank, args.strategy)
    program: CompiledProgram = compile_example(file.model, file.example, settings, name=args.model)
    worker = program.worker(sgd, backend="gloo", device="cpu")
    example = program._example
    batch = (*example.inputs.values(), *example.targets.values()) if worker.data_rank is not None else ()
    sizes = worker.rank.spec.batch_offsets
    own = sizes[worker.data_rank + 1] - sizes[worker.data_rank] if worker.data_rank is not None else 0
    batch = tuple(each.repeat(-(-own // len(each)), *[1] * (each.dim() - 1))[:own] for each in batch)
    for step in range(1, args.steps + 1):
        worker.step(*batch)
        if worker.rank.index == 0:
            print(f"made {step}", flush=True)
    worker.close()


if __name__ == "__main__":
    sys.exit(main())
