"""CPU seconds of a compile, phase by phase, and of a second one of the same model.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time resnet152 gpt2 --strategy data_parallel --profile tracing
    python -m benchmarks.compile_time vgg16 --answer --world 8

The phases are those that the command line names.  One more is `again`, the analysis of the same model for another
strategy, world or cluster in the same process, which does not validate it again and reads the counted costs.

One thread; each model at a batch of 8, for four ranks of a described cluster.

--answer: seconds by the clock, on all threads, from the call of `splitc.compile` to its plan, and from there to the
verdict of validation, which follows behind; beside them forward and backward of three examples.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from examples.alexnet import alexnet
from examples.resnet import resnet18
from examples.transformer import next_token_loss, transformer
from examples.vgg16 import vgg16
from splitc.capture.example.example import Example
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


def answer(name: str, strategy: str, world: int) -> tuple[float, float, float]:
    """Seconds to the plan, from there to the verdict, and of a forward and backward of three examples."""
    make, data, loss = MODELS[name]
    torch.manual_seed(0)
    model, (inputs, target) = make(), data()
    os.environ["SPLITC_ADVICE"] = "0"
    with TemporaryDirectory() as folder:
        os.environ["SPLITC_CACHE"] = folder
        begin = time.perf_counter()
        program = splitc.compile(model, world, inputs, target, loss, cluster=CLUSTER, strategy=strategy)
        assert isinstance(program, splitc.CompiledProgram) and program.plan
        planned = time.perf_counter()
        program.validated()
        done = time.perf_counter()
    for _ in range(2):
        run = time.perf_counter()
        loss(model(inputs[:3]), target[:3]).backward()
    return planned - begin, done - planned, time.perf_counter() - run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--profile", choices=PHASES)
    parser.add_argument("--answer", action="store_true")
    parser.add_argument("--world", type=int, default=WORLD)
    options = parser.parse_args()
    if options.answer:
        print("| model | to the plan, s | from there to the verdict, s | forward and backward of 3, s |")
        print("|---|---:|---:|---:|")
        for name in options.models:
            cells = [f"{each:.2f}" for each in answer(name, options.strategy, options.world)]
            print(f"| {' | '.join([name, *cells])} |", flush=True)
        return
    torch.set_num_threads(1)
    measure("resnet18", options.strategy)  # what torch imports and starts on first use
    print(f"| model | {' | '.join((*PHASES, 'all but validating'))} |")
    print("|---|" + "---:|" * (len(PHASES) + 1))
    for name in options.models:
        seconds = measure(name, options.strategy, options.profile)
        own = sum(seconds[phase] for phase in OF_ONE_COMPILE if phase != "validating")
        cells = [f"{each:.2f}" for each in (*seconds.values(), own)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
