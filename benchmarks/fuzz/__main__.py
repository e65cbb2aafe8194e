"""Fuzz everything that reads input: `python -m benchmarks.fuzz --examples 20000`, with Hypothesis.

An input works, or is refused with one error of splitc.  Any other exception, a hang, a file outside of the folder, and
a text that becomes code is a failure; failures are listed by class, each with its shortest input.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from tabulate import tabulate

from benchmarks.fuzz.commands import Commands
from benchmarks.fuzz.oracle import Judge
from benchmarks.fuzz.subjects import PAIRS, Subjects


def fuzz(folder: Path, examples: int, number: int = 0, only: Iterable[str] = ()) -> Judge:
    """Run so many examples, shared out to the kinds; returns what was found.  only: these kinds."""
    judge, before = Judge(folder), os.getcwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for kind in Subjects(folder).kinds():
                if not only or kind.name in only:
                    count = max(1, round(examples * kind.share))
                    run = kind.run
                    _each(kind.inputs, count, number, lambda value: judge(kind.name, value, lambda: run(value)))  # noqa: B023
                    print(f"{kind.name}: {judge.outcomes[kind.name]}, {len(judge.found)} classes", file=sys.stderr)
    finally:
        os.chdir(before)
    return judge


def fuzz_commands(folder: Path, examples: int, number: int = 0) -> Judge:
    """Run so many commands in processes of their own; returns what was found."""
    judge = Judge(folder)
    commands = Commands(folder, judge)
    _each(commands.inputs(PAIRS), examples, number, commands)
    return judge


def _each(inputs: SearchStrategy[Any], examples: int, number: int, call: Callable[[Any], object]) -> None:
    """Call with so many inputs."""

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(inputs)
    def one(value: object) -> None:
        call(value)

    one()


def main() -> int:
    """Print the table of outcomes and the classes of failures; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", type=int, metavar="N", help="only N inputs of commands, in processes of their own")
    parser.add_argument("--only", nargs="*", default=(), help="kinds of input")
    args = parser.parse_args()
    os.environ |= {"SPLITC_CACHE": "off", "SPLITC_ADVICE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder).resolve()
        if args.command:
            judge = fuzz_commands(where, args.command, args.seed)
        else:
            judge = fuzz(where, args.examples, args.seed, args.only)
    rows = [[kind, *counts.values()] for kind, counts in judge.outcomes.items()]
    print(tabulate(rows, ["input", "works", "refused", "wrong"]))
    print(f"{sum(map(sum, (counts.values() for counts in judge.outcomes.values())))} examples")
    for text, (times, shortest) in sorted(judge.found.items()):
        print(f"\n{text}\n  {times} times, shortest: {shortest[:2000]}")
    return int(bool(judge.found))


if __name__ == "__main__":
    sys.exit(main())
