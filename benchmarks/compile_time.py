"""CPU seconds of a compile, phase by phase, and of a second one of the same model.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time resnet152 gpt2 --strategy data_parallel --profile tracing
    python -m benchmarks.compile_time --answer
    python -m benchmarks.compile_time vgg16 resnet18 --answer --world 8

The phases are those that the command line names.  One more is `again`, the analysis of the same model for another
strategy, world or cluster in the same process, which does not validate it again and reads the counted costs.

One thread; each model at a batch of 8, for four ranks of a described cluster.

--answer: seconds from the call of `splitc.compile` to its plan, by the clock and of CPU, and from there to the verdict
of validation, which follows behind; beside them forward and backward of three examples.  Each model in a process of
its own, which has imported torch, on this machine as a cluster, without a cache.  Without models: VGG-16 on 8 ranks,
ResNet-152 on 1,024, a chain of 1,000 layers on 16, and the median of those of `benchmarks.real_models` on 4.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from benchmarks.real_models import case as real
from benchmarks.real_models.__main__ import installed
from examples.alexnet import alexnet
from examples.resnet import resnet18
from examples.transformer import next_token_loss, transformer
from examples.vgg16 import vgg16
from splitc.capture.example.example import Example
from splitc.cost_models.clusters.named import load_cluster
from splitc.passes.analysis import analyse
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings, specialise

CLUSTER, WORLD, BATCH = "v100-10gbe", 4, 8
OF_ONE_COMPILE = (
    "tracing", "tracing the evaluation", "validating", "counting the layers", "planning", "writing programs",
    "simulating", "measuring the memory",
)  # fmt: skip
PHASES = (*OF_ONE_COMPILE, "again")


class Bottleneck(nn.Module):
    """Three convolutions, each with BatchNorm, and a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel, stride=by, padding=kernel // 2, bias=False) for a, b, kernel, by in sizes
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.shortcut = nn.Sequential()
        if before != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y if k == 0 else F.relu(y)))
        return F.relu(y + self.shortcut(x))


def resnet152() -> nn.Module:
    """ResNet-152 for images of 224x224: 60.2 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    before = 64
    for k, depth in enumerate((3, 8, 36, 3)):
        for block in range(depth):
            layers.append(Bottleneck(before, 64 * 2**k, 2 if block == 0 and k > 0 else 1))
            before = 256 * 2**k
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def gpt2() -> nn.Module:
    """GPT-2's sizes: 12 blocks of width 768, 50257 tokens, one table at both ends."""
    return transformer(50257, 768, 12, 12, 1024, tied=True)


def chain(depth: int = 1_000) -> nn.Module:
    """So many linear layers, with a ReLU between any two."""
    return nn.Sequential(*(nn.ReLU() if k % 2 else nn.Linear(64, 64) for k in range(2 * depth - 1)))


def _images(size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, size, size), torch.randint(classes, (BATCH,))


def _tokens(time: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (BATCH, time)), torch.randint(vocabulary, (BATCH, time))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any]] = {
    "alexnet": (alexnet, lambda: _images(224, 1000), F.cross_entropy),
    "vgg16": (vgg16, lambda: _images(224, 1000), F.cross_entropy),
    "resnet18": (resnet18, lambda: _images(32, 10), F.cross_entropy),
    "resnet152": (resnet152, lambda: _images(224, 1000), F.cross_entropy),
    "transformer": (transformer, lambda: _tokens(64, 32_000), next_token_loss),
    "gpt2": (gpt2, lambda: _tokens(64, 50257), next_token_loss),
    "chain": (chain, lambda: (torch.randn(BATCH, 64), torch.randint(64, (BATCH,))), F.cross_entropy),
}


class _Phases:
    """CPU seconds by what a compile says it is doing; the phase to profile is printed."""

    def __init__(self, profiled: str | None = None) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._profile, self._profiled = cProfile.Profile(time.thread_time), profiled
        self._phase, self._begin = "", time.process_time()

    def now(self, what: str) -> None:
        """End the phase that runs, and begin another one."""
        here = time.process_time()
        if self._phase:
            self.seconds[self._phase] += here - self._begin
        if self._phase == self._profiled:
            self._profile.disable()
        self._phase, self._begin = what.removesuffix(" of").removesuffix(" for"), time.process_time()
        if self._phase == self._profiled:
            self._profile.enable()

    def print_profile(self) -> None:
        """Print where the profiled phase spent its time."""
        if self._profiled:
            pstats.Stats(self._profile).sort_stats("cumulative").print_stats(60)


def measure(name: str, strategy: str, profiled: str | None = None) -> dict[str, float]:
    """CPU seconds of each phase of compiling a model."""
    make, data, loss = MODELS[name]
    torch.manual_seed(0)
    model, (inputs, target) = make(), data()
    example = Example.bind(model, inputs, target, loss)
    settings = Settings(WORLD, cluster=CLUSTER, strategy=parse_strategy(strategy))
    phases = _Phases(profiled)
    with TemporaryDirectory() as folder:
        os.environ["SPLITC_CACHE"] = folder
        program = analyse(model, example, now=phases.now)
        phases.now("planning")
        specialise(program, settings, now=phases.now)
        phases.now("again")
        analyse(model, example)
        phases.now("")
    phases.print_profile()
    return phases.seconds


def answer(name: str, strategy: str, world: int, is_real: bool = False) -> tuple[float, ...]:
    """Seconds to the plan, the same of CPU, and to the verdict; of forward and backward of three examples.

    is_real: a model of `benchmarks.real_models`, which is not run.
    """
    warnings.simplefilter("ignore")
    os.environ |= {"SPLITC_ADVICE": "0", "SPLITC_CACHE": "off"}
    torch.manual_seed(0)
    if is_real:
        case = real.entries()[name].make(BATCH)
    else:
        make, data, loss = MODELS[name]
        case = real.Case(make(), *data(), loss)
    case.module.train()
    cluster, three = load_cluster(None), case.rows(slice(0, 3))
    begin, used = time.perf_counter(), time.process_time()
    given = case.module, world, case.inputs, case.target, case.loss
    program = splitc.compile(*given, cluster=cluster, strategy=strategy)
    assert isinstance(program, splitc.CompiledProgram) and program.plan
    planned, used = time.perf_counter(), time.process_time() - used
    program.validated()
    done = run = time.perf_counter()
    for _ in range(0 if is_real else 2):
        run = time.perf_counter()
        case.loss(case.module(three[0]), three[1]).backward()
    return planned - begin, used, done - planned, time.perf_counter() - run


def answers(models: list[str], strategy: str, world: int) -> None:
    """Print a line for each model, one after the other; without models the four figures."""
    asked = [(name, world) for name in models] or [("vgg16", 8), ("resnet152", 1024), ("chain", 16)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.compile_time"])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        print("| model | ranks | to the plan, s | CPU, s | from there to the verdict, s | forward, backward of 3, s |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, ranks in asked:
            cells = [f"{each:.2f}" for each in pool.submit(answer, name, strategy, ranks).result()]
            print(f"| {' | '.join([name, str(ranks), *cells])} |", flush=True)
        there = [name for name, entry in real.entries().items() if entry.batched and installed(entry.package)]
        known = [] if models else there
        found = list(pool.map(answer, known, repeat(strategy), repeat(WORLD), repeat(True)))
    if found:
        cells = [f"{statistics.median(each):.2f}" for each in list(zip(*found, strict=True))[:3]]
        print(f"| median of {len(found)} real models | {' | '.join([str(WORLD), *cells, ''])} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--profile", choices=PHASES)
    parser.add_argument("--answer", action="store_true")
    parser.add_argument("--world", type=int, default=WORLD)
    options = parser.parse_args()
    if options.answer:
        answers(options.models, options.strategy, options.world)
        return
    torch.set_num_threads(1)
    measure("resnet18", options.strategy)  # what torch imports and starts on first use
    print(f"| model | {' | '.join((*PHASES, 'all but validating'))} |")
    print("|---|" + "---:|" * (len(PHASES) + 1))
    for name in options.models or MODELS:
        seconds = measure(name, options.strategy, options.profile)
        own = sum(seconds[phase] for phase in OF_ONE_COMPILE if phase != "validating")
        cells = [f"{each:.2f}" for each in (*seconds.values(), own)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
