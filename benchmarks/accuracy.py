"""How wrong are the prices?  Predicted step seconds beside measured ones: models x strategies x worlds x networks.

For each world ranks are launched once on a testbed, calibrated at each rate of the network, and then every plan for the
calibrated cluster is run again and again, all of them in turns (`campaign`).

    python -m benchmarks.accuracy                                        64 cells, 5 runs of each
    python -m benchmarks.accuracy --models mlp --world 2 --repeats 2     a quick look
    python -m benchmarks.accuracy --from accuracy/figures.json           the table once more
    python -m benchmarks.accuracy --from accuracy/figures.json --predict     of what would be predicted now
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.campaign import Campaign, Settings, rates_of
from benchmarks.cases import MODELS, Case, predictions
from benchmarks.errors import BenchmarkError
from benchmarks.figures import MEDIAN, WORST, Cell, Figures, report
from benchmarks.layout import for_each
from benchmarks.machine import machine
from splitc.cli.options import positive
from splitc.errors import SplitcError
from splitc.ir.cluster_file import parse_cluster
from splitc.ir.plan import Plan
from splitc.passes.planner.strategy import parse_strategy

STRATEGIES = ("data_parallel", "layer_separation", "late_multiply", "modulo_shard")
RATES = ("230Mbit", "none")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read what was measured, and print the table.  The exit status is in the help."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    try:
        if args.figures is not None:
            figures = Figures.from_json(_text(args.figures), str(args.figures))
            figures = predicted_again(figures) if args.predict else figures
        else:
            figures = _measured(args, arguments)
    except (BenchmarkError, SplitcError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; --from {args.output / 'figures.json'} shows what was measured", file=sys.stderr)
        return 130
    print("\n".join(f"{what}: {words}" for what, words in figures.about.items()), end="\n\n")
    print(report(figures))
    return 0 if figures.within else 1


def cells(models: Sequence[str], strategies: Sequence[str], worlds: Sequence[int], rates: Sequence[str]) -> list[Cell]:
    """All combinations.  Raises BenchmarkError or PlacementError for a rate or a strategy that there is not."""
    for strategy in strategies:
        parse_strategy(strategy)
    for rate in rates:
        for world in worlds:
            for_each(rates_of(rate), world, "rate")
    return [
        Cell(model, strategy, world, rate)
        for world in worlds
        for rate in rates
        for model in models
        for strategy in strategies
    ]


def predicted_again(figures: Figures) -> Figures:
    """The same measurements, with what is predicted now for the same plans on the same clusters."""
    cases = {name: Case(name) for name in dict.fromkeys(r.cell.model for r in figures.results if r.plan)}
    results = []
    for result in figures.results:
        if result.plan:
            cell, key = result.cell, f"{result.cell.world} {result.cell.rate}"
            cluster = parse_cluster(figures.clusters[key], f"the cluster of {key}")
            compiled = cases[cell.model].compile(cell, cluster, Plan.from_json(result.plan))
            result = replace(result, predicted=predictions(compiled.program, cluster))
        results.append(result)
    return replace(figures, results=tuple(results))


def _measured(args: argparse.Namespace, arguments: Sequence[str]) -> Figures:
    settings = Settings(args.repeats, args.cpus, args.mtu, args.budget, args.foreign, args.clusters)
    args.output.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(
        cells(args.models, args.strategies, args.world, args.rates),
        settings,
        args.output,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    campaign.run(_about(arguments))
    return campaign.figures


def _about(arguments: Sequence[str]) -> dict[str, str]:
    return {
        "command": shlex.join(["python", "-m", "benchmarks.accuracy", *arguments]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"cannot read {path}: {error}") from error


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    usual = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description="Predicted step seconds beside measured ones, on a network testbed that was calibrated before.",
        epilog=f"exit codes: 0 the median error is at most {MEDIAN:.0%} and the worst {WORST:.0%}; 1 they are not, or "
        "a cell was not measured; 2 it could not be run; 130 stopped by Ctrl-C",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(MODELS),
        metavar="MODEL",
        help=f"{', '.join(MODELS)}, or as for splitc compile (default: those)",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=list(STRATEGIES),
        metavar="STRATEGY",
        help=f"as for splitc compile (default: {' '.join(STRATEGIES)})",
    )
    parser.add_argument("--world", nargs="+", type=positive, default=[2, 4], metavar="N", help="ranks (default: 2 4)")
    parser.add_argument(
        "--rates",
        nargs="+",
        default=list(RATES),
        metavar="RATE",
        help=f"of each rank's link, none for an unshaped network (default: {' '.join(RATES)})",
    )
    parser.add_argument(
        "--repeats", type=positive, default=usual.repeats, metavar="N", help="runs of each cell (default: %(default)s)"
    )
    parser.add_argument(
        "--cpus", type=_amount, default=usual.cpus, help="processors that the ranks share (default: %(default)g)"
    )
    parser.add_argument(
        "--mtu", type=positive, default=usual.mtu, help="bytes of a frame without its header (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=_amount,
        default=usual.budget,
        metavar="SECONDS",
        help="of each calibration, about (default: %(default)g)",
    )
    parser.add_argument(
        "--foreign",
        type=_fraction,
        default=usual.foreign,
        metavar="FRACTION",
        help="of the processors: a run is repeated when other processes took more (default: %(default)g)",
    )
    parser.add_argument(
        "--clusters", type=Path, metavar="FOLDER", help="take the clusters of an earlier campaign, do not calibrate"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("accuracy"),
        metavar="FOLDER",
        help="where figures.json and the calibrated clusters go (default: %(default)s)",
    )
    parser.add_argument(
        "--from", dest="figures", type=Path, metavar="FILE", help="the table of a figures.json, without measuring"
    )
    parser.add_argument("--predict", action="store_true", help="with --from: predict anew for the same plans")
    return parser


if __name__ == "__main__":
    sys.exit(main())
