"""Approximate training against exact: accuracy over time on a slow network.

    python -m benchmarks.approximate                                    measure what is missing in results.jsonl
    python -m benchmarks.approximate --tasks mnist --ranks 2 --seeds 1  a quick look
    python -m benchmarks.approximate --table                            the table of what was measured
    python -m benchmarks.approximate --page docs/measurements/approximate.md    write the tables and the plot there

Linux, root, `ip` and `tc`, as for all that needs the network testbed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.approximate.campaign import Settings, measure, wanted
from benchmarks.approximate.curves import FOREIGN, Results
from benchmarks.approximate.methods import METHODS
from benchmarks.approximate.report import into, report
from benchmarks.approximate.tasks import TASKS
from benchmarks.errors import BenchmarkError
from splitc.cli.options import positive


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or show what was measured.  The exit status is 2 when the campaign cannot go on."""
    args = _parser().parse_args(argv)
    try:
        results = Results(args.out)
        if not (args.table or args.page):
            keys = wanted(args.tasks, args.ranks, args.methods, args.seeds)
            settings = Settings(args.cpus, args.budget, args.foreign, args.tries)
            measure(keys, results, settings, lambda line: print(line, file=sys.stderr, flush=True))
        if args.page:
            image = args.page.with_suffix(".svg")
            args.page.write_text(into(args.page.read_text(encoding="utf-8"), results, image.name), encoding="utf-8")
            from benchmarks.approximate.plot import plot  # matplotlib takes a second to load

            plot(list(results.curves.values()), image)
        else:
            print(report(results))
    except (BenchmarkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.out}", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.approximate", description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ranks", type=_numbers, default=[2, 4, 8], metavar="N,N", help="default 2,4,8")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--seeds", type=positive, default=5, metavar="N", help="of each curve at most (default 5)")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"), metavar="FILE", help="default results.jsonl")
    parser.add_argument("--table", action="store_true", help="only show what was measured")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only write what was measured into a page")
    parser.add_argument("--cpus", type=float, default=2.0, metavar="N", help="processors of all ranks (default 2)")
    parser.add_argument("--budget", type=float, default=12.0, metavar="S", help="of a calibration, about (default 12)")
    parser.add_argument(
        "--foreign",
        type=float,
        default=FOREIGN,
        metavar="X",
        help="processors' part that may go elsewhere (default 0.05)",
    )
    parser.add_argument("--tries", type=positive, default=2, metavar="N", help="of a disturbed curve (default 2)")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
