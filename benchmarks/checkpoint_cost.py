"""What checkpoints cost: rounds of steps with none, with an asynchronous one and with a plain one, in turns.

Quarter AlexNet on the testbed, under the plan of `auto` or of --strategy, one checkpoint for every ten steps: python -m
benchmarks.checkpoint_cost.  A turn ends when the ranks have met again, so what is written in the background counts as
far as it slows the ten steps after it.  With --copies: copies in memory, as of --neighbour-copy 20, 5 and 1, where each
rank is a host.
"""

from __future__ import annotations

import argparse
import os
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
from splitc.runtime.launch.options import copies_every

KINDS, COPIES = ("none", "asynchronous", "plain"), ("none", "20", "5", "1")
WORLD, STEPS = 4, 10


def rank(folder: Path, rounds: int, strategy: str, kinds: tuple[str, ...]) -> None:
    """Train in turns, and print on rank 0 the seconds of every turn."""
    model, example, target = alexnet_quarter.model(), alexnet_quarter.example(32), alexnet_quarter.target(32)
    loss = alexnet_quarter.loss
    program = splitc.compile(model, WORLD, example, target, loss, cluster="v100-10gbe", strategy=strategy)
    worker = program.worker(lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.9))
    batch = (*example, target) if worker.data_rank is not None else ()
    transport = worker.rank.transport
    memory = folder / f"host{worker.rank.index}"
    memory.mkdir()
    os.environ["SPLITC_MEMORY"] = str(memory)
    worker.save(folder / "run")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(rounds + 1):
        for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
            every, beside = copies_every(int(kind), 1) if kind.isdecimal() else (STEPS, kind == "asynchronous")
            transport.barrier()
            begin = time.perf_counter()
            for step in range(STEPS):
                worker.step(*batch).item()
                if kind.isdecimal() and step % every == 0:
                    worker.neighbour_copy(beside)
                elif kind in ("asynchronous", "plain") and step == 0:
                    worker.save(folder / kind, asynchronous=beside)
            transport.barrier()
            if turn:  # the first one warms up
                seconds[kind].append(time.perf_counter() - begin)
            worker.close()
    worker.step(*batch)
    before = transport.sent_bytes
    worker.neighbour_copy(asynchronous=False)
    sent = transport.all_gather_objects(transport.sent_bytes - before)
    held = transport.all_gather_objects(sum(path.stat().st_size for path in memory.rglob("*") if path.is_file()))
    worker.close()
    if worker.rank.index == 0:
        print(f"{program.plan.strategy}; {STEPS} steps to a turn; of a copy in memory the hosts, in MB,")
        for text, each in (("hold", held), ("send", sent)):
            print(f"  {text} {', '.join(f'{nbytes / 1e6:.2f}' for nbytes in each)}")
        for kind in kinds:
            ratios = [mine / none for mine, none in zip(seconds[kind], seconds["none"], strict=True)]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"{kind:13} {statistics.median(seconds[kind]):7.3f} s, x {statistics.median(ratios):.3f} ({spread})")
    transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rate", type=parse_rate, default=parse_rate("230Mbit"))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.rounds, args.strategy, COPIES if args.copies else KINDS)
        return
    command = [sys.executable, "-m", "benchmarks.checkpoint_cost", *sys.argv[1:], "--rank"]
    memory = "/dev/shm" if args.copies else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as folder,
        NetworkTestbed(WORLD, rate=args.rate, cpus=2 / WORLD) as testbed,
    ):
        ranks = [testbed.start(k, [*command, folder]) for k in range(WORLD)]
        for process in ranks:
            process.wait()
        print(f"other processes took {testbed.foreign_load():.0%} of the processors")


if __name__ == "__main__":
    main()
