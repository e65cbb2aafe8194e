"""Random plans of random small models, against one process: values in every state, groups, roles and microbatches.

    python -m benchmarks.random_plans                        500 of them
    python -m benchmarks.random_plans --count 50 --first 1234

Prints every plan that trains differently or sends other bytes than defined, which transitions there were, and the
refused plans by reason.  The exit status is 1 when a plan differs, or a refusal names no layer.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

from tabulate import tabulate

from tests.support.random_plans import Outcome, outcome


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.random_plans", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=500, help="how many (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (default 0)")
    args = parser.parse_args(argv)
    begin, outcomes = time.perf_counter(), []
    for seed in range(args.first, args.first + args.count):
        outcomes.append(_outcome(seed))
        if outcomes[-1].wrong:
            print(f"seed {seed} differs: {outcomes[-1].asked}\n{outcomes[-1].wrong}", flush=True)
        if outcomes[-1].refused and not outcomes[-1].names_a_layer:
            print(f"seed {seed} is refused without a layer: {outcomes[-1].asked}\n{outcomes[-1].refused}", flush=True)
    trained = [each for each in outcomes if not each.refused]
    refused = [each for each in outcomes if each.refused]
    wrong, unnamed = sum(bool(each.wrong) for each in outcomes), sum(not each.names_a_layer for each in refused)
    moves = Counter(str(transition) for each in trained for transition in set(each.transitions))
    reasons = Counter(each.reason for each in refused)
    print(tabulate(moves.most_common(), ["transition", "plans"], "plain"), end="\n\n")
    print(tabulate(reasons.most_common(), ["refused", "plans"], "plain", maxcolwidths=[100, None]), end="\n\n")
    equal, seconds = len(trained) - wrong, time.perf_counter() - begin
    print(f"{len(outcomes)} plans: {equal} equal, {wrong} different, {len(refused)} refused, {seconds:.0f} s")
    return int(bool(wrong or unnamed))


def _outcome(seed: int) -> Outcome:
    """What became of a seed; an error that is no refusal counts as different."""
    try:
        return outcome(seed)
    except Exception as error:
        return Outcome(seed, wrong="".join(traceback.format_exception(error)[-2:]))


if __name__ == "__main__":
    sys.exit(main())
