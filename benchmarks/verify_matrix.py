"""Every exact strategy against one process: models x strategies x worlds.

Each cell is the largest error of loss, gradients and parameters over three steps, on simulated ranks.

    python -m benchmarks.verify_matrix                                  all of it, float32 and float64
    python -m benchmarks.verify_matrix --models mlp alexnet --worlds 2 4 --dtype float64

The exit status is 1 when a plan that could be made does not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError, SplitcError
from splitc.ir.program import Program
from splitc.passes.analysis import analyse
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings, specialise

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLDS = (2, 3, 4, 6, 8)
DTYPES = {"float32": None, "float64": torch.float64}


@dataclass(frozen=True)
class Model:
    """A model with one reader's batch of its data."""

    module: nn.Module
    example: Any
    target: Any
    loss: Any

    @cached_property
    def bound(self) -> Example:
        return Example.bind(self.module, self.example, self.target, self.loss)

    def program(self) -> Program:
        return analyse(self.module, self.bound)


def _file(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _alexnet() -> Model:
    """Width 1/20, images of 64 x 64."""
    file = _file("alexnet")
    return Model(file.alexnet(0.05, 10), file.example(8, 64), file.target(8, 10), file.loss)


def _vgg() -> Model:
    """VGG-16 with BatchNorm, width 1/16, images of 32 x 32."""
    file = _file("vgg16")
    return Model(file.vgg16(0.0625, 10, batch_norm=True), file.example(8, 32), file.target(8, 10), file.loss)


def _mlp() -> Model:
    """Features that 3, 6 and 8 ranks do not divide."""
    file = _file("mlp")
    return Model(file.mlp(50, (31, 47), 10), (torch.randn(8, 50),), file.target(8, 10), file.loss)


def _transformer() -> Model:
    """A decoder with 1021 tokens, width 32, 2 blocks, 12 time steps."""
    file = _file("transformer")
    model = file.transformer(vocabulary=1021, width=32, depth=2, heads=4, time=12)
    return Model(model, file.example(8, 12, 1021), file.target(8, 12, 1021), file.loss)


def _recommender() -> Model:
    """Embedding tables of 500, 97 and 11 rows, width 8."""
    file = _file("recommender")
    rows = {"users": 500, "items": 97, "categories": 11}
    return Model(
        file.recommender(**rows, width=8, hidden=33), file.example(8, **rows, seen=5), file.target(8), file.loss
    )


MODELS: dict[str, Callable[[], Model]] = {
    "alexnet": _alexnet,
    "vgg": _vgg,
    "mlp": _mlp,
    "transformer": _transformer,
    "recommender": _recommender,
}


def strategies(world: int) -> Iterator[str]:
    """Every exact strategy, with the options that make a difference, for a world."""
    yield "data_parallel"
    yield "parameter_server"
    yield "parameter_server(servers=2,beside=True)"
    yield "layer_separation"
    if world > 2:
        yield f"layer_separation(n_c={world - 2},n_f=2)"
    yield "hybrid_single"
    yield "late_multiply"
    for size in dict.fromkeys((2 if world % 2 == 0 else 3, world)):
        for scheme in ("BK", "B", "B/K"):
            yield f"modulo_shard(mp={size},scheme={scheme})"


@dataclass(frozen=True)
class Cell:
    """One plan's largest error, or why there is no such plan."""

    model: str
    strategy: str
    world: int
    dtype: str
    error: float | None
    holds: bool
    why: str = ""


def measure(name: str, worlds: Iterable[int], dtypes: Iterable[str], only: Iterable[str] | None) -> Iterator[Cell]:
    """The cells of one model."""
    torch.manual_seed(0)
    model = MODELS[name]()
    program = model.program()
    for world in worlds:
        for text in only or strategies(world):
            settings = Settings(world, strategy=parse_strategy(text), cluster="v100-10gbe")
            for dtype in dtypes:
                try:
                    placed = specialise(program, settings)
                except PlacementError as error:
                    yield Cell(name, text, world, dtype, None, True, str(error).splitlines()[0])
                    continue
                compiled = CompiledProgram(placed, model.module, model.bound, settings)
                try:
                    found = compiled.verify(dtype=DTYPES[dtype])
                except (SplitcError, RuntimeError) as error:
                    yield Cell(name, text, world, dtype, None, False, f"{type(error).__name__}: {error}")
                    continue
                worst = max(found.loss_error, found.gradient_error, found.parameter_error)
                yield Cell(
                    name, text, world, dtype, worst, found.holds, "" if found.holds else found.where or found.worst
                )


def table(cells: list[Cell], dtype: str) -> str:
    """Rows of model and strategy, a column for each world."""
    worlds = sorted({cell.world for cell in cells})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for cell in cells:
        if cell.dtype == dtype:
            kind = _general(cell.strategy, cell.world)
            text = (
                "-" if cell.error is None and cell.holds else f"{cell.error:.0e}" if cell.error is not None else "fails"
            )
            rows.setdefault((cell.model, kind), {})[cell.world] = text if cell.holds else f"{text} NO"
    body = [[model, kind, *(found.get(world, "") for world in worlds)] for (model, kind), found in rows.items()]
    headers = ["model", "strategy", *(f"N = {world}" for world in worlds)]
    return str(tabulate(body, headers, disable_numparse=True))


def _general(strategy: str, world: int) -> str:
    """The strategy without the world's own number, so that it makes one row."""
    return strategy.replace(f"n_c={world - 2},", "n_c=N-2,").replace(f"mp={world},", "mp=N,")


def main(argv: list[str] | None = None) -> int:
    """Print the tables; 1 when something does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_matrix", description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    parser.add_argument("--strategies", nargs="+", default=None, help="instead of every exact one")
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    args = parser.parse_args(argv)
    begin, cells = time.perf_counter(), []
    for name in args.models:
        for cell in measure(name, args.worlds, args.dtype, args.strategies):
            cells.append(cell)
            if not cell.holds:
                print(f"{cell.model} {cell.strategy} N={cell.world} {cell.dtype}: {cell.error} {cell.why}", flush=True)
    for dtype in args.dtype:
        print(f"\nlargest error in {dtype}, tolerance {'1e-9' if dtype == 'float64' else '1e-5'}; - no such plan")
        print(table(cells, dtype))
    measured = [cell for cell in cells if cell.error is not None]
    bad = sum(not cell.holds for cell in cells)
    print(f"\n{len(measured)} plans verified in {time.perf_counter() - begin:.0f} s, {bad} do not hold")
    for why in dict.fromkeys(f"{c.model}, {_general(c.strategy, c.world)}: {c.why}" for c in cells if c.error is None):
        print(f"  - {why}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
