"""Is what splitc chooses the fastest of all exact plans in reality?  Models x places, on shaped networks.

python -m benchmarks.choice                                       the cells that choice.json has not
python -m benchmarks.choice --cells alexnet@11@82Mbit             some of them
python -m benchmarks.choice --until plans                         calibrate and plan, and measure with the next command
python -m benchmarks.choice --table --markdown table.md           what was measured
python -m benchmarks.choice --predict                             the same, with the errors of today's prices
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.choice.cases import CELLS
from benchmarks.choice.figures import Cell, Figures, report
from benchmarks.choice.measure import STAGES, Measuring, Settings
from benchmarks.errors import BenchmarkError
from benchmarks.machine import machine
from splitc.cli.options import positive
from splitc.errors import SplitcError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the tables; 2 when it could not be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    settings = Settings(
        args.rounds,
        args.best,
        args.finalists,
        args.cpus,
        args.budget,
        args.tune,
        args.foreign,
        args.until,
        tuple(args.strategies),
    )
    try:
        figures, cells = Figures(args.output), [Cell.parse(text) for text in args.cells] or CELLS
        folder = args.output.with_suffix(".clusters")
        measuring = Measuring(cells, settings, figures, folder, lambda line: print(line, file=sys.stderr, flush=True))
        if args.predict:
            measuring.predict()
        elif not args.table:
            command = shlex.join(["python", "-m", "benchmarks.choice", *arguments])
            figures.about = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
            measuring.run()
    except (BenchmarkError, SplitcError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    lines = [f"{what}: {words}" for what, words in figures.about.items()]
    print(text := "\n".join([*lines, "", report(figures)]))
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=[], metavar="MODEL@RANKS@RATE", help=f"default: {len(CELLS)}")
    parser.add_argument("--rounds", type=positive, default=usual.rounds, metavar="N", help="that tell regret")
    parser.add_argument("--best", type=positive, default=usual.best, metavar="N", help="in rounds, besides the choices")
    parser.add_argument("--finalists", type=positive, default=usual.finalists, metavar="N", help="of auto, run briefly")
    parser.add_argument("--strategies", nargs="+", default=[], metavar="NAME", help="in place of all, beside auto's")
    parser.add_argument("--cpus", type=float, default=usual.cpus, metavar="N", help="processors of all ranks")
    parser.add_argument("--budget", type=float, default=usual.budget, metavar="SECONDS", help="of a calibration")
    parser.add_argument("--tune", type=float, default=usual.tune, metavar="SECONDS", help="of tuning; 0: none")
    parser.add_argument("--foreign", type=float, default=usual.foreign, metavar="X", help="part that may go elsewhere")
    parser.add_argument("--until", choices=STAGES, default=usual.until, help="the last stage (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="only show what was measured")
    parser.add_argument("--predict", action="store_true", help="only simulate the plans again, by today's prices")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too")
    parser.add_argument("-o", "--output", type=Path, default=Path("choice.json"), metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
