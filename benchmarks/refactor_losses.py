"""Prove that a refactor kept the training: losses of every example under every strategy, bit for bit.

    python -m benchmarks.refactor_losses f868e7a            of all examples
    python -m benchmarks.refactor_losses f868e7a mlp resnet

Three steps of each cell run on simulated ranks, in this checkout and in a clone of the commit, each in a process of its
own.  Losses are compared as hexadecimal floats, candidates' prices as printed.  The exit status is 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
CLASSES, WORDS = {"num_classes": 10}, {"vocabulary": 50, "time": 12}
ROWS = {"dense": 6, "users": 40, "items": 30, "categories": 5}
IMAGE = ({"width": 0.05, **CLASSES}, {"image": 32}, CLASSES)
SMALL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alexnet": ({"width": 0.05, **CLASSES}, {"image": 96}, CLASSES),
    "mlp": ({"hidden": (32, 24, 48), **CLASSES}, {}, CLASSES),
    "recommender": ({"width": 8, "hidden": 16, **ROWS}, {"seen": 3, **ROWS}, {}),
    "resnet": ({"width": 8, **CLASSES}, {}, CLASSES),
    "transformer": ({"width": 16, "depth": 2, **WORDS}, WORDS, WORDS),
    "vgg16": IMAGE,
    "vgg19": IMAGE,
}
"""Example -> arguments that make its model, its example batch and its target small."""

BATCH, STEPS = 4, 3


def strategies(world: int) -> Iterator[str]:
    """Every exact strategy, with the options that make a difference."""
    if world == 1:
        yield from ("single_device", "auto", "data_parallel")
        return
    yield from ("auto", "data_parallel", "data_parallel(all_reduce=recursive_doubling)", "hybrid_single")
    yield from ("parameter_server", "parameter_server(overlap=False)", "parameter_server(servers=2,beside=True)")
    yield from ("layer_separation", "late_multiply", "data_parallel(sync_batchnorm=True)")
    if world > 2:
        yield from (f"layer_separation(n_c={world - 2},n_f=2)", f"layer_separation(ranks={world - 2}+1+1)")
    for size in dict.fromkeys((2 if world % 2 == 0 else 3, world)):
        yield from (f"modulo_shard(mp={size},scheme={scheme})" for scheme in ("BK", "B", "B/K"))


def dump(path: Path, names: list[str]) -> None:
    """Write the losses and prices of every cell, with the splitc that is imported here."""
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    cells: dict[str, Any] = {}
    for name in names:
        for world in (1, 2, 3, 4):
            for strategy in strategies(world):
                cells[f"{name}, {world} ranks, {strategy}"] = _cell(name, world, strategy)
        print(f"{name}: {len(cells)} cells", flush=True)
    path.write_text(json.dumps(cells))


def _cell(name: str, world: int, strategy: str) -> Any:
    """Losses of each rank and each candidate's price; the error where the strategy has no plan."""
    import splitc

    model, batch, targets = SMALL[name]
    file = import_module(f"examples.{name}")
    torch.manual_seed(0)
    example, target = file.example(batch=BATCH, **batch), file.target(batch=BATCH, **targets)
    module = file.model(**model)
    try:
        program: Any = splitc.compile(
            module, world, example, target, file.loss, cluster="v100-10gbe", strategy=strategy, name=name
        )
    except splitc.PlacementError:
        return "no plan"
    tensors = [*(example.values() if isinstance(example, dict) else example), target]
    readers = len(program.plan.roles[program.plan.reader])
    feeds = [[_batch(tensors, BATCH, step * readers + reader) for reader in range(readers)] for step in range(STEPS)]
    run_ranks, run_trial = (
        _first("run_ranks", "transport.simulated", "simulated"),
        _first("run_trial", "launch.trial", "trial"),
    )
    weights, sizes = program.weights(), [BATCH] * readers
    trials = run_ranks(world, lambda t: run_trial(program.files, t, weights, feeds, sizes, 0.01, 0.9))
    prices = [f"{c.strategy} {c.step_seconds!r}" for c in program.plan.candidates]
    return {"losses": [[loss.hex() for loss in trial.losses] for trial in trials], "prices": prices}


def _batch(tensors: list[Tensor], examples: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, BATCH, (examples,), generator=generator)
    noise = (torch.randn(t[rows].shape, generator=generator) if t.is_floating_point() else 0 for t in tensors)
    return tuple(t[rows] + n for t, n in zip(tensors, noise, strict=True))


def _first(name: str, *modules: str) -> Any:
    """A function of the runtime, in the first module that is there: the older commit has other names."""
    for module in modules:
        try:
            return getattr(import_module(f"splitc.runtime.{module}"), name)
        except ModuleNotFoundError:
            continue
    raise LookupError(name)


def main() -> int:
    """Dump in both checkouts, compare and print; 1 when a cell differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.refactor_losses", description=__doc__.split("\n")[0])
    parser.add_argument("commit", help="the commit before the refactor")
    parser.add_argument("names", nargs="*", choices=[[], *SMALL], help="examples; all of them by default")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or list(SMALL)
    if args.dump is not None:
        dump(args.dump, names)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "before"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "checkout", "-q", args.commit], cwd=clone, check=True)
        found = []
        for checkout in (clone, ROOT):
            out = Path(folder) / f"{checkout.name}.json"
            command = [sys.executable, __file__, args.commit, *names, "--dump", str(out)]
            subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True)
            found.append(json.loads(out.read_text()))
    before, now = found
    differing = [cell for cell in before if before[cell] != now[cell]]
    for cell in differing:
        print(f"{cell}:\n  before {before[cell]}\n  now    {now[cell]}")
    trained = sum(cell != "no plan" for cell in before.values())
    print(f"{trained} plans trained, {len(before) - trained} cells without a plan, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
