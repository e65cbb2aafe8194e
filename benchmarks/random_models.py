"""Random models with random losses: training on simulated ranks against a plain loop of torch.

    python -m benchmarks.random_models                       500 of them
    python -m benchmarks.random_models --models 50 --first 1234

Prints every model that trains differently, and how many were refused, by reason.  The exit status is 1 when one trains
differently, or more than 5 % are refused.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections import Counter

from tabulate import tabulate

from tests.support.random_training import Outcome, outcome


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.random_models", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (default 0)")
    args = parser.parse_args(argv)
    begin, outcomes = time.perf_counter(), []
    for seed in range(args.first, args.first + args.models):
        outcomes.append(_outcome(seed))
        if outcomes[-1].wrong:
            lines = "\n  ".join(outcomes[-1].wrong[:5])
            print(f"seed {seed} differs, {outcomes[-1].run}\n  {lines}", flush=True)
    refused = [each for each in outcomes if each.refused]
    wrong = sum(bool(each.wrong) for each in outcomes)
    reasons = Counter(re.sub(r"\d+", "N", each.refused)[:100] for each in refused)
    strategies = Counter(each.run.strategy for each in outcomes if each.run is not None)
    print(tabulate(strategies.most_common(), ["strategy", "models"], "plain"), end="\n\n")
    if reasons:
        print(tabulate(reasons.most_common(), ["refused", "models"], "plain"), end="\n\n")
    equal, seconds = len(outcomes) - wrong - len(refused), time.perf_counter() - begin
    print(f"{len(outcomes)} models: {equal} equal, {wrong} different, {len(refused)} refused, {seconds:.0f} s")
    return int(bool(wrong) or len(refused) > 0.05 * len(outcomes))


def _outcome(seed: int) -> Outcome:
    """What became of a seed; an error that is no refusal counts as different."""
    try:
        return outcome(seed)
    except Exception as error:
        return Outcome(seed, wrong=tuple(traceback.format_exception(error)[-2:]))


if __name__ == "__main__":
    sys.exit(main())
