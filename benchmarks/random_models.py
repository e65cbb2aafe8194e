"""Random models with random losses: training on simulated ranks against a plain loop of torch.

    python -m benchmarks.random_models                                  500 of them
    python -m benchmarks.random_models --number 1000 --first 0 --jobs 2
    python -m benchmarks.random_models --number 1 --first 1234          repeats one

Prints every model that trains differently or crashes, and how many were refused, by reason.  The exit status is 1 when
one trains differently or crashes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from tabulate import tabulate

from tests.support.random_training import Outcome, outcome


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.random_models", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    args = parser.parse_args(argv)
    begin, outcomes = time.perf_counter(), []
    for each in outcomes_of(range(args.first, args.first + args.number), args.jobs):
        outcomes.append(each)
        if each.wrong or each.crashed:
            repeat = f"python -m benchmarks.random_models --number 1 --first {each.seed}"
            print(f"{'crashed' if each.crashed else 'wrong'}: {each}\n  {repeat}", flush=True)
        elif each.refused and args.number == 1:
            print(each)
    print(table(outcomes))
    counts = counted(outcomes)
    names = (f"{count} {name}" for name, count in counts.items())
    print(f"\n{len(outcomes)} models: {', '.join(names)}; {time.perf_counter() - begin:.0f} s")
    return int(counts["wrong"] + counts["crashed"] > 0)


def outcomes_of(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """What becomes of these seeds, in their order."""
    if jobs == 1:
        yield from map(outcome, seeds)
        return
    with multiprocessing.get_context("forkserver").Pool(jobs, torch.set_num_threads, (1,), maxtasksperchild=50) as pool:
        yield from pool.imap(outcome, seeds)


def table(outcomes: Sequence[Outcome]) -> str:
    """The models of each kind, and the refusals, wrong ones and crashes by reason."""
    kinds = sorted({each.of for each in outcomes})
    rows: list[list[object]] = []
    for kind in kinds:
        own = [each for each in outcomes if each.of == kind]
        rows.append([kind, *counted(own).values(), f"{sum(each.seconds for each in own) / len(own):.2f}"])
    text = [tabulate(rows, ["model", *counted([]), "CPU seconds each"], "plain")]
    for name in ("refused", "crashed"):
        found = [each for each in outcomes if getattr(each, name)]
        reasons = Counter(reason(getattr(each, name)) for each in found)
        if reasons:
            example = {reason(getattr(each, name)): each.seed for each in reversed(found)}
            lines = [[why, count, example[why]] for why, count in reasons.most_common()]
            text.append(tabulate(lines, [name, "models", "such as seed"], "plain", maxcolwidths=[110, None, None]))
    return "\n\n".join(text)


def counted(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many were right, refused, wrong, and crashed."""
    names = {"right": "is_right", "refused": "refused", "wrong": "wrong", "crashed": "crashed"}
    return {name: sum(bool(getattr(each, of)) for each in outcomes) for name, of in names.items()}


def reason(message: str) -> str:
    """A message without its numbers, lines and names, so that equal reasons are counted together."""
    message = message.partition("\n")[0]
    message = re.sub(r"\b[\w.]+\.py:\d+", "FILE", message)
    return re.sub(r"\b(\w+_)?\d+(\.\d+)*\b|\[.*?\]", "N", message)[:220]


if __name__ == "__main__":
    sys.exit(main())
