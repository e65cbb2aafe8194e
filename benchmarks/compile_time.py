"""CPU seconds of a compile, phase by phase, and of a second one of the same model.

    python -m benchmarks.compile_time
    python -m benchmarks.compile_time resnet152 gpt2 --strategy data_parallel --profile costs

    capture, validate, costs    the analysis, with nothing kept from before
    specialise                  the plan, the rewriting, the simulation of a step, the memory of the ranks
    again                       the analysis for another strategy, world or cluster, in the same process
    process                     the same in another process, which reads what the first one kept on disk

One thread; each model at a batch of 8, for four ranks of a described cluster.
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

from examples.alexnet import alexnet
from examples.resnet import resnet18
from examples.transformer import next_token_loss, transformer
from examples.vgg16 import vgg16
from splitc.analysis import analyse
from splitc.capture.capture import capture
from splitc.capture.example import Example
from splitc.capture.group_layers import gather_coupled
from splitc.capture.validate import validate_capture
from splitc.compiled import Settings, specialise
from splitc.ir.pass_manager import run_pass
from splitc.ir.strategies import parse_strategy
from splitc.passes.measure_costs import MeasureCosts

CLUSTER, WORLD, BATCH = "v100-10gbe", 4, 8
PHASES = ("capture", "validate", "costs", "specialise", "again", "process")
OF_ONE_COMPILE = 4  # of these phases


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
    """CPU seconds of each phase; the one to profile is printed."""

    def __init__(self, profiled: str | None) -> None:
        self.seconds: dict[str, float] = {}
        self._profiled = profiled

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        """Return what `work` does, timed."""
        profile = cProfile.Profile(time.thread_time) if phase == self._profiled else None
        begin = time.process_time()
        result = profile.runcall(work) if profile is not None else work()
        self.seconds[phase] = time.process_time() - begin
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        return result


def measure(name: str, strategy: str, profiled: str | None = None, validate: bool = True) -> dict[str, float]:
    """CPU seconds of each phase of compiling a model."""
    make, data, loss = MODELS[name]
    torch.manual_seed(0)
    model, (inputs, target) = make(), data()
    example = Example.bind(model, inputs, target, loss)
    settings = Settings(WORLD, cluster=CLUSTER, strategy=parse_strategy(strategy))
    phases = _Phases(profiled)
    os.environ["SPLITC_CACHE"] = "off"
    program = phases.run("capture", lambda: capture(model, example))
    if validate:
        program = phases.run("validate", lambda: validate_capture(program, model, example))
    program = phases.run("costs", lambda: run_pass(MeasureCosts(), gather_coupled(program)))
    phases.run("specialise", lambda: specialise(program, settings))
    if validate:
        with TemporaryDirectory() as folder:
            os.environ["SPLITC_CACHE"] = folder
            analyse(model, example)
            phases.run("again", lambda: analyse(model, example))
            again = make()
            phases.run("process", lambda: analyse(again, Example.bind(again, inputs, target, loss)))
    return phases.seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--profile", choices=PHASES)
    parser.add_argument("--no-validate", action="store_true", help="leave out validation, and what follows from it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure("resnet18", options.strategy)  # what torch imports and starts on first use
    print("| model | " + " | ".join((*PHASES[:OF_ONE_COMPILE], "all but validate", *PHASES[OF_ONE_COMPILE:])) + " |")
    print("|---|" + "---:|" * (len(PHASES) + 1))
    for name in options.models:
        seconds = measure(name, options.strategy, options.profile, not options.no_validate)
        own = sum(s for phase, s in seconds.items() if phase in PHASES[:OF_ONE_COMPILE] and phase != "validate")
        cells = [f"{seconds[phase]:.2f}" if phase in seconds else "" for phase in PHASES]
        print(
            "| " + " | ".join([name, *cells[:OF_ONE_COMPILE], f"{own:.2f}", *cells[OF_ONE_COMPILE:]]) + " |", flush=True
        )


if __name__ == "__main__":
    main()
