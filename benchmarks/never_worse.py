"""Is `auto` ever worse than a strategy of the papers?  Simulated samples/s: examples x clusters x worlds.

    python -m benchmarks.never_worse --jobs 2                            all cells that never_worse.jsonl has not
    python -m benchmarks.never_worse --examples mlp --worlds 2,4         a quick look
    python -m benchmarks.never_worse --no-more --markdown table.md       the ranges over the worlds, for the page

Each strategy is planned twice: among the others under `auto`, and by itself, as a user who asks for it by name has it.
The exit status is 1 where `auto` is below one of these plans by more than `LEAST`, and the cells are named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
from tabulate import tabulate

from splitc.cli.model_file import load_model
from splitc.cli.options import positive
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError, SplitcError
from splitc.ir.program import Program
from splitc.passes.analysis import analyse
from splitc.passes.place import Place
from splitc.passes.planner.strategy import parse_strategy

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ("data_parallel", "parameter_server", "layer_separation", "hybrid_single", "modulo_shard", "late_multiply")
EXAMPLES = ("alexnet", "mlp", "recommender", "resnet", "transformer", "vgg16", "vgg19")
CLUSTERS = ("cpu16-1gbe", "rtx3090-2.5gbe", "rtx4090-10gbe", "v100-10gbe", "t4-pcie-50gbe", "a100-nvlink-200ib")
WORLDS = (2, 4, 8, 16, 32, 64)
LEAST = 1e-6  # a smaller fraction is none


@dataclass(frozen=True, order=True)
class Cell:
    """A file of examples/, without its .py; a cluster; a number of ranks."""

    example: str
    cluster: str
    world: int

    def __str__(self) -> str:
        return f"{self.example} on {self.world} of {self.cluster}"


@dataclass(frozen=True)
class Result:
    """Simulated samples/s of a cell; a strategy without a plan has none.

    chosen: the strategy of auto's plan.  among: of each strategy under auto.  alone: planned by itself.  seconds: that
    the cell took.  why: auto has no plan.
    """

    cell: Cell
    auto: float = 0.0
    chosen: str = ""
    among: Mapping[str, float] = field(default_factory=dict)
    alone: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""

    @property
    def best(self) -> float:
        """Samples/s of the fastest plan of the papers, however it was planned; 0 without one."""
        return max((*self.among.values(), *self.alone.values()), default=0.0)

    @property
    def worse(self) -> list[str]:
        """The plans of the papers that are faster than auto's."""
        found = [
            f"{name}, {how}: {rate:.6g} samples/s"
            for how, rates in (("under auto", self.among), ("by itself", self.alone))
            for name, rate in rates.items()
            if rate > self.auto * (1 + LEAST)
        ]
        return [f"{self.cell}: auto {self.auto:.6g} samples/s ({self.chosen or self.why}), {each}" for each in found]

    @property
    def factors(self) -> tuple[float, float] | None:
        """Samples/s by those of the best plan of the papers, and by those of data parallelism."""
        base = max((rates.get("data_parallel", 0.0) for rates in (self.among, self.alone)), default=0.0)
        return (self.auto / self.best, self.auto / base) if self.best and base else None

    @property
    def gains(self) -> str:
        """The factors in words: `1.21 (4.0)`."""
        return "-" if self.factors is None else "{:.2f} ({:.1f})".format(*self.factors)


def result(cell: Cell) -> Result:
    """Plan a cell with auto and with each strategy."""
    begin, program, cluster = time.monotonic(), _program(cell.example), load_cluster(cell.cluster)
    alone: dict[str, float] = {}
    for name in PAPERS:
        try:
            alone[name] = Place(cluster, cell.world, parse_strategy(name)).run(program).plan.samples_per_second
        except PlacementError:
            continue
    try:
        plan = Place(cluster, cell.world, parse_strategy("auto")).run(program).plan
    except PlacementError as error:
        return Result(cell, alone=alone, seconds=time.monotonic() - begin, why=str(error))
    priced = [each for each in plan.prediction.candidates if each.strategy in PAPERS and each.feasible]
    among = {each.strategy: each.samples_per_second for each in priced}
    return Result(cell, plan.samples_per_second, plan.strategy, among, alone, time.monotonic() - begin)


@cache
def _program(example: str) -> Program:
    torch.manual_seed(0)
    file = load_model(str(ROOT / "examples" / f"{example}.py"))
    return analyse(file.model, file.example, name=file.name, evaluation=False)


def read(path: Path) -> dict[Cell, Result]:
    """The results in a file of one JSON a line; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [Result(**{**data, "cell": Cell(**data["cell"])}) for data in map(json.loads, lines)]
    return {each.cell: each for each in found}


def measure(cells: Sequence[Cell], jobs: int) -> Iterable[Result]:
    """The results in the order in which they come."""
    if jobs == 1:
        yield from map(result, cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from (each.result() for each in as_completed([pool.submit(result, cell) for cell in cells]))


def table(results: Iterable[Result]) -> str:
    """A row for each example and cluster, a column for each world."""
    found = {each.cell: each for each in results}
    worlds = sorted({cell.world for cell in found})
    rows = []
    for example, cluster in dict.fromkeys((cell.example, cell.cluster) for cell in found):
        row = [found.get(Cell(example, cluster, world)) for world in worlds]
        rows.append((example, cluster, *("" if each is None else each.gains for each in row)))
    return tabulate(rows, ("example", "cluster", *map(str, worlds)), tablefmt="pipe", disable_numparse=True)


def ranges(results: Iterable[Result]) -> str:
    """A row for each example, a column for each cluster: the least and the largest gains over the worlds."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in results:
        if each.factors is not None:
            found.setdefault(each.cell.example, {}).setdefault(each.cell.cluster, []).append(each.factors)
    clusters = list(dict.fromkeys(cluster for row in found.values() for cluster in row))
    rows = [(example, *(_range(row.get(cluster, [])) for cluster in clusters)) for example, row in found.items()]
    return tabulate(rows, ("example", *clusters), tablefmt="pipe", disable_numparse=True)


def _range(factors: Sequence[tuple[float, float]]) -> str:
    if not factors:
        return ""
    best, base = zip(*factors, strict=True)
    return f"{min(best):.2f} to {max(best):.2f} ({min(base):.1f} to {max(base):.1f})"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    wanted = [Cell(*each) for each in ((e, c, w) for w in args.worlds for e in args.examples for c in args.clusters)]
    there = read(args.file)
    missing = [] if args.no_more else [cell for cell in wanted if cell not in there]
    try:
        for k, each in enumerate(measure(missing, args.jobs), 1):
            there[each.cell] = each
            with args.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(each)) + "\n")
            words = f"[{k}/{len(missing)}] {each.cell}: {each.gains} {each.chosen} {each.seconds:.1f} s"
            print(words, *each.worse, sep="\n  ", file=sys.stderr, flush=True)
    except SplitcError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.file}", file=sys.stderr)
        return 130
    shown = [there[cell] for cell in sorted(wanted) if cell in there]
    print(table(shown))
    if args.markdown:
        args.markdown.write_text(ranges(shown) + "\n", encoding="utf-8")
    worse = [line for each in shown for line in each.worse]
    print(f"\n{len(shown)} of {len(wanted)} cells; auto is worse in {len(worse)} comparisons", *worse, sep="\n")
    return 1 if worse else 0


def _parser() -> argparse.ArgumentParser:
    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.never_worse", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=words, default=EXAMPLES, metavar="A,B", help="default: all models")
    parser.add_argument(
        "--clusters", type=words, default=CLUSTERS, metavar="A,B", help=f"default: {','.join(CLUSTERS)}"
    )
    parser.add_argument(
        "--worlds", type=lambda text: [positive(each) for each in words(text)], default=WORLDS, metavar="N,M"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument(
        "--from", dest="file", type=Path, default=Path("never_worse.jsonl"), metavar="FILE", help="results, one a line"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the ranges over the worlds there")
    parser.add_argument("--no-more", action="store_true", help="plan nothing, only show what is in the file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
