"""What `compile_stages` gains: steps with stages compiled and steps with stages as they are, in turns.

    python -m benchmarks.compile_stages                                  all models on one rank and on two over gloo
    python -m benchmarks.compile_stages --models transformer --worlds 1

Each line has the medians of 20 steps of each kind after a warm-up, their ratio, and what `compile_stages=True` comes
to: 1 where it does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import splitc
from splitc.runtime.compiled_stages import CompiledStages
from splitc.runtime.launch.main import load_worker
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport.distributed import init

WORDS = {"vocabulary": 4000, "time": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alexnet": ({"width": 0.25}, {"batch": 16, "image": 64}, {"batch": 16}),
    "mlp": ({}, {"batch": 64}, {"batch": 64}),
    "recommender": ({"users": 20_000}, {"users": 20_000}, {}),
    "resnet": ({"width": 16}, {"batch": 32}, {"batch": 32}),
    "transformer": ({"width": 192, "depth": 4, **WORDS}, {"batch": 8, **WORDS}, {"batch": 8, **WORDS}),
    "vgg16": ({"width": 0.25}, {"batch": 8, "image": 64}, {"batch": 8}),
    "vgg19": ({"width": 0.25}, {"batch": 8, "image": 64}, {"batch": 8}),
}
"""Model file of `examples` -> sizes of its model, example and target that suit two cores."""

WARM_UP, STEPS = 4, 20


class CNN(nn.Module):
    """Convolutions with normalisations and activations, most of which can be fused: 1.2 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 256)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.SiLU(), nn.Conv2d(b, b, 3, 1, 1), nn.SiLU())
            for a, b in pairwise(widths)
        ]
        self.features, self.head = nn.Sequential(*blocks), nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


class Encoder(nn.Module):
    """Four blocks of a transformer with dropout, without tables: 0.8 M parameters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        options: Any = {"activation": "gelu", "norm_first": True, "batch_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, **options) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(x.mean(1))
        return scores


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (CNN, (16, 3, 64, 64)),
    "encoder": (Encoder, (16, 64, 128)),
}
"""Models of this file, and the shapes of their examples."""


def build(name: str, world: int, folder: Path) -> None:
    """Compile a model for data parallelism."""
    if name in OWN:
        make, shape = OWN[name]
        given: tuple[Any, ...] = make(), (torch.randn(shape),), torch.arange(shape[0]) % 10
        loss: Any = nn.functional.cross_entropy
    else:
        of_model, of_example, of_target = MODELS[name]
        file = importlib.import_module(f"examples.{name}")
        given = file.model(**of_model), file.example(**of_example), file.target(**of_target)
        loss = file.loss
    model, example, target = given
    on: dict[str, Any] = {"cluster": "v100-10gbe", "strategy": "data_parallel" if world > 1 else "single_device"}
    splitc.compile(model, world, example, target, loss, **on).save(folder)
    torch.save((example, target) if isinstance(example, dict) else (*example, target), folder / "batch.pt")


def rank(folder: Path) -> None:
    """Train in turns; print on rank 0 the median seconds of both kinds, and of the warm-up."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    transport = init()
    worker = load_worker(folder, transport, lambda params: torch.optim.SGD(params, lr=1e-4), compile_stages="inductor")
    stages = next(each for each in worker._features if isinstance(each, CompiledStages))
    batch = torch.load(folder / "batch.pt") if worker.data_rank is not None else ()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    begin = time.perf_counter()
    for _ in range(WARM_UP):
        worker.step(*batch)
    warm_up = time.perf_counter() - begin
    for turn in range(2 * STEPS):
        stages._is_on = turn % 4 in (0, 3)
        transport.barrier()
        begin = time.perf_counter()
        worker.step(*batch).item()
        seconds[stages._is_on].append(time.perf_counter() - begin)
    if transport.rank == 0:
        with_it, without = (statistics.median(seconds[kind]) for kind in (True, False))
        print(f"{with_it} {without} {warm_up} {stages._why}")
    transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *OWN], default=[*MODELS, *OWN], metavar="NAME")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank)
        return
    print(f"{'model':12} ranks  compiled     eager  gain  as True  warm-up")
    for name in args.models:
        for world in args.worlds:
            with tempfile.TemporaryDirectory() as folder:
                build(name, world, Path(folder))
                done = torchrun(["-m", "benchmarks.compile_stages", "--rank", folder], world, quiet=True)
            if done.returncode:
                sys.exit(done.stderr)
            with_it, without, warm_up, *why = done.stdout.split(maxsplit=3)
            gain = float(without) / float(with_it)
            times = f"{float(with_it) * 1e3:6.1f} ms {float(without) * 1e3:6.1f} ms"
            print(f"{name:12} {world:5} {times}  {gain:.2f}     {max(gain, 1):.2f}  {float(warm_up):5.1f} s", *why)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
