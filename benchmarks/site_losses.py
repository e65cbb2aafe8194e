"""Do sites learn as DiLoCo in one process does?  Losses after equal samples, over five seeds.

Two sites of two simulated ranks train by `sites`: data parallelism inside, between them fragments in int8 with error
feedback that arrive half a period later.  Beside them DiLoCo (Douillard et al., 2023, algorithm 1), written in a loop
of plain torch: two copies, whole parameters in float32, averaged at the end of each period.

    python -m benchmarks.site_losses
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from functools import partial

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.func import functional_call

import splitc
from benchmarks.wire_curves import SEEDS, TASKS, Task
from splitc.runtime.launch.trial import run_trial
from splitc.runtime.transport.simulated import run_ranks

WORLD, SITES, PERIOD, ROUNDS, MOMENTUM = 4, 2, 16, 24, 0.9
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
RATE = 0.1  # of the rates of `wire_curves`, with which the outer momentum overshoots
STEPS = PERIOD * ROUNDS
Batches = list[list[tuple[Tensor, ...]]]
"""For each step, for each rank, its batch."""


def batches(task: Task, data: tuple[Tensor, Tensor]) -> Batches:
    """Batches in the order of torch's global seed; a site gets as many examples as a step of `wire_curves`."""
    inputs, targets = data
    rows = torch.randint(len(inputs), (STEPS, WORLD, task.batch // (WORLD // SITES)))
    return [[(inputs[own], targets[own]) for own in step] for step in rows]


def in_sites(
    task: Task, program: splitc.CompiledProgram, state: dict[str, Tensor], feeds: Batches
) -> dict[str, Tensor]:
    """The parameters and buffers that the ranks end with."""
    sizes = [len(feeds[0][0][0])] * WORLD
    weights = {**program.weights(), "state": state}
    train = partial(run_trial, program.files, weights=weights, feeds=feeds, sizes=sizes, period=STEPS)
    return run_ranks(WORLD, lambda transport: train(transport, learning_rate=RATE * task.rate, momentum=MOMENTUM))[
        0
    ].states[-1]


def diloco(task: Task, model: nn.Module, feeds: Batches) -> dict[str, Tensor]:
    """The parameters that DiLoCo in one process ends with."""
    outer = torch.optim.SGD(model.parameters(), OUTER["outer_lr"], momentum=OUTER["outer_momentum"], nesterov=True)
    copies = [copy.deepcopy(model) for _ in range(SITES)]
    inner = [torch.optim.SGD(each.parameters(), RATE * task.rate, momentum=MOMENTUM) for each in copies]
    for step, feed in enumerate(feeds, 1):
        for site, (each, optimizer) in enumerate(zip(copies, inner, strict=True)):
            inputs, targets = map(torch.cat, zip(*feed[site::SITES], strict=True))
            optimizer.zero_grad()
            task.loss(each(inputs), targets).backward()
            optimizer.step()
        if step % PERIOD == 0:
            for whole, *parts in zip(model.parameters(), *(each.parameters() for each in copies), strict=True):
                whole.grad = whole.detach() - torch.stack([part.detach() for part in parts]).mean(0)
            outer.step()
            for each in copies:
                each.load_state_dict(model.state_dict())
    return model.state_dict()


def main(argv: Sequence[str] | None = None) -> int:
    """Train all, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.site_losses", description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=int, default=8, help="updates that a fragment is on its way")
    parser.add_argument("--mixing", type=float, help="of a rank's own parameters, when a fragment arrives")
    parser.add_argument("--wire", default="int8", help="of what changed; exact: float32")
    parser.add_argument("--tasks", nargs="+", default=[task.name for task in TASKS])
    args = parser.parse_args(argv)
    options = {"period": PERIOD, "delay": args.delay, "mixing": args.mixing, **OUTER}
    torch.set_num_threads(1)
    rows = []
    for task in [task for task in TASKS if task.name in args.tasks]:
        data = task.data()
        own = task.batch // (WORLD // SITES)
        program = splitc.compile(
            task.model(),
            WORLD,
            data[0][:own],
            data[1][:own],
            task.loss,
            strategy=splitc.Sites(inside="data_parallel", ranks=2, **options),
            cluster="v100-10gbe",
            wire={"averages": args.wire} if args.wire != "exact" else "exact",
        )
        assert isinstance(program, splitc.CompiledProgram)
        found = []
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            model = task.model()
            state, feeds = copy.deepcopy(model.state_dict()), batches(task, data)
            states = in_sites(task, program, state, feeds), diloco(task, model, feeds)
            with torch.no_grad():
                found.append([float(task.loss(functional_call(model, each, data[0]), data[1])) for each in states])
        ratios = [sites / alone for sites, alone in found]
        means = [f"{statistics.mean(each):.4f} ± {statistics.stdev(each):.4f}" for each in zip(*found, strict=True)]
        rows.append([task.name, *means, f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"])
        print(tabulate(rows, ["", "sites", "DiLoCo in one process", "ratio, median and range"], "github"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
