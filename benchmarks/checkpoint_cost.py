"""What checkpoints cost: rounds of steps with none, with an asynchronous one and with a plain one, in turns.

Quarter AlexNet under the plan of `auto` on the testbed, one checkpoint for every ten steps: python -m
benchmarks.checkpoint_cost.  A turn ends when the ranks have met again, so what is written in the background counts as
far as it slows the ten steps after it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import splitc
from benchmarks.layout import parse_rate
from benchmarks.models import alexnet_quarter
from benchmarks.testbed import NetworkTestbed

KINDS = ("none", "asynchronous", "plain")
WORLD, STEPS = 4, 10


def rank(folder: Path, rounds: int) -> None:
    """Train in turns, and print on rank 0 the seconds of every turn."""
    model, example, target = alexnet_quarter.model(), alexnet_quarter.example(32), alexnet_quarter.target(32)
    program = splitc.compile(model, WORLD, example, target, alexnet_quarter.loss, cluster="v100-10gbe")
    worker = program.worker(lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9))
    batch = (*example, target) if worker.data_rank is not None else ()
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(rounds + 1):
        for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
            worker.rank.transport.barrier()
            begin = time.perf_counter()
            for step in range(STEPS):
                worker.step(*batch).item()
                if step == 0 and kind != "none":
                    worker.save(folder / kind, asynchronous=kind == "asynchronous")
            worker.rank.transport.barrier()
            if turn:  # the first one warms up
                seconds[kind].append(time.perf_counter() - begin)
            worker.close()
    if worker.rank.index == 0:
        nbytes = sum(path.stat().st_size for path in (folder / "plain").rglob("*") if path.is_file()) / 2
        print(f"{program.plan.strategy}, {nbytes / 1e6:.1f} MB a checkpoint, {STEPS} steps to each")
        for kind in KINDS:
            ratios = [mine / none for mine, none in zip(seconds[kind], seconds["none"], strict=True)]
            print(f"{kind:13} {statistics.median(seconds[kind]):7.3f} s, x {statistics.median(ratios):.3f} of none")
    worker.rank.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=parse_rate, default=parse_rate("230Mbit"))
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.rounds)
        return
    command = [sys.executable, "-m", "benchmarks.checkpoint_cost", "--rounds", str(args.rounds), "--rank"]
    with tempfile.TemporaryDirectory() as folder, NetworkTestbed(WORLD, rate=args.rate, cpus=2 / WORLD) as testbed:
        ranks = [testbed.start(k, [*command, folder]) for k in range(WORLD)]
        for process in ranks:
            process.wait()
        print(f"other processes took {testbed.foreign_load():.0%} of the processors")


if __name__ == "__main__":
    main()
