"""Measure plans of splitc beside DDP and beside scripts written by hand, and print the table.

python -m benchmarks.overlap                                              all places, what overlap.json has not
python -m benchmarks.overlap --estimate                                   for how long
python -m benchmarks.overlap --places 4@100Mbit --alternations 3          a quick look
python -m benchmarks.overlap --places 4@230Mbit --plan mine=plan.json --sides mine
python -m benchmarks.overlap --table                                      what was measured
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.machine import machine
from benchmarks.overlap.figures import Figures, report
from benchmarks.overlap.measure import Measuring, Settings
from benchmarks.overlap.sides import BASE, PLACES, SIDES, Place, Side
from splitc.cli.options import positive
from splitc.errors import SplitcError


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table; 2 when it could not be run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    settings = Settings(
        args.alternations, args.batch, args.image, args.warm_up, args.steps, args.cpus, args.budget, args.foreign
    )
    try:
        figures, sides = Figures(args.output), all_sides(args.strategy, args.plan)
        for name in args.forget:
            figures.forget(name)
        if not args.table:
            places = [Place.parse(text) for text in args.places] or PLACES
            chosen = {place: at(place, sides, args.sides) for place in places}
            measuring = Measuring(chosen, settings, figures, lambda line: print(line, file=sys.stderr, flush=True))
            if args.estimate:
                minutes = {place: measuring.estimate(place) / 60 for place in places}
                print("\n".join(f"{place}: {each:.0f} min" for place, each in minutes.items()))
                print(f"in all: {sum(minutes.values()):.0f} min")
                return 0
            command = shlex.join(["python", "-m", "benchmarks.overlap", *arguments])
            figures.about = {"command": command, "date": time.strftime("%Y-%m-%d"), "machine": machine()}
            measuring.run()
    except (BenchmarkError, SplitcError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {args.output}", file=sys.stderr)
        return 130
    print(report(figures, {side.name: side.against for side in sides}))
    return 0


def all_sides(strategies: Sequence[str], plans: Sequence[str]) -> list[Side]:
    """Those of `SIDES`, and those of the command line, NAME=VALUE.  Raises BenchmarkError for anything else."""
    sides = {side.name: side for side in SIDES}
    for what, texts in (("strategy", strategies), ("plan", plans)):
        for text in texts:
            name, _, value = text.partition("=")
            if not name or not value:
                raise BenchmarkError(f"--{what} {text!r}: write NAME=VALUE")
            sides[name] = Side(name, strategy=value) if what == "strategy" else Side(name, plan=value)
    return list(sides.values())


def at(place: Place, sides: Sequence[Side], names: Sequence[str]) -> list[Side]:
    """DDP, and the sides of these names, or those that are measured at a place by default."""
    if unknown := set(names) - {side.name for side in sides}:
        raise BenchmarkError(f"there is no side {sorted(unknown)[0]!r}; there are {[side.name for side in sides]}")
    return [
        side
        for side in sides
        if side.name == BASE or (side.name in names if names else not side.places or str(place) in side.places)
    ]


def _parser() -> argparse.ArgumentParser:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--places", nargs="+", default=[], metavar="RANKS@RATE", help=f"default {[*map(str, PLACES)]}")
    parser.add_argument(
        "--sides", nargs="+", default=[], metavar="NAME", help="beside DDP; default: each where it says"
    )
    parser.add_argument("--strategy", action="append", default=[], metavar="NAME=TEXT", help="one more side")
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=FILE", help="one more side, a plan.json")
    parser.add_argument("--forget", action="append", default=[], metavar="NAME", help="a side to be measured again")
    parser.add_argument("--alternations", type=positive, default=usual.alternations, metavar="N")
    parser.add_argument("--batch", type=positive, default=usual.batch, metavar="N", help="examples of a rank")
    parser.add_argument("--image", type=positive, default=usual.image, metavar="N", help="pixels a side")
    parser.add_argument("--warm-up", type=positive, default=usual.warm_up, metavar="N", help="steps of a run")
    parser.add_argument("--steps", type=positive, default=usual.steps, metavar="N", help="of a run, that count")
    parser.add_argument("--cpus", type=float, default=usual.cpus, metavar="N", help="processors of all ranks")
    parser.add_argument("--budget", type=float, default=usual.budget, metavar="SECONDS", help="of a calibration")
    parser.add_argument("--foreign", type=float, default=usual.foreign, metavar="X", help="part that may go elsewhere")
    parser.add_argument("--estimate", action="store_true", help="only say for how long")
    parser.add_argument("--table", action="store_true", help="only show what was measured")
    parser.add_argument("-o", "--output", type=Path, default=Path("overlap.json"), metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
