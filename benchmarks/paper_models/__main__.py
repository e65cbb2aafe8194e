"""Train models written after their papers on ranks, hold them against a plain loop and `verify`, and write the table.

    python -m benchmarks.paper_models                                   # all of them
    python -m benchmarks.paper_models simclr dlrm --jobs 2
    python -m benchmarks.paper_models --page docs/measurements/real-models.md        # replaces the page's part for them

Each is compiled for 2 ranks under data_parallel and for 4 under auto.  Four steps on simulated ranks, the batches of
which differ in size, are compared with a plain loop of torch: losses, evaluations, gradients and state.  Models of
packages need them installed, as `benchmarks/real_models/requirements.txt` has them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.paper_models.case import papers
from benchmarks.paper_models.measure import PLANS, Result, Trained, measured

HEADING = "## Models after their papers"
INTRODUCTION = """\
Written by `python -m benchmarks.paper_models --page docs/measurements/real-models.md` with torch {torch}: small
models, written by hand after papers, or tiny configurations of packages, of kinds that are hard to divide; authors and
titles are in `benchmarks/paper_models/zoo/`. Each trains four steps of batches that differ in size, on simulated ranks,
under `data_parallel` on 2 and `auto` on 4, and is compared with a plain loop of torch in float64: losses, evaluations,
gradients, state. An error is the largest of `verify`; {trains} of {models} train, those in bold not under both.
"""


def page(results: Sequence[Result]) -> str:
    """The part of the page."""
    trains = sum(each.trains for each in results)
    introduction = INTRODUCTION.format(torch=torch.__version__, trains=trains, models=len(results))
    text = [
        HEADING,
        "",
        textwrap.fill(introduction, 120, break_long_words=False, break_on_hyphens=False),
        "",
        "| kind | models | error, data_parallel | error, auto |",
        "| --- | --- | ---: | ---: |",
    ]
    for kind in dict.fromkeys(each.kind for each in results):
        some = [each for each in results if each.kind == kind]
        names = (each.name if each.trains else f"**{each.name}**" for each in some)
        errors = (_largest([each.trained[k] for each in some]) for k in range(len(PLANS)))
        text.append(f"| {kind} | {', '.join(names)} | {' | '.join(errors)} |")
    refused = {r.name: why for r in results for t in r.trained if (why := t.refused or t.wrong)}
    if refused:
        text += [
            "",
            "| refused or wrong | why |",
            "| --- | --- |",
            *(f"| {name} | {why} |" for name, why in refused.items()),
        ]
    return "\n".join(text) + "\n"


def _largest(trained: Sequence[Trained]) -> str:
    errors = [each.error for each in trained if each.error is not None and not each.wrong]
    return f"{max(errors):.0e}" if errors else ""


def main(argv: list[str] | None = None) -> int:
    """Print a line for each model; 1 when one trains wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.paper_models", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--page", type=Path, help="the page whose part is replaced")
    args = parser.parse_args(argv)
    names = args.names or [name for name, each in papers().items() if not each.package or find_spec(each.package)]
    results = []
    with multiprocessing.get_context("forkserver").Pool(args.jobs, maxtasksperchild=4) as pool:
        for result in pool.imap(measured, names):
            results.append(result)
            for t in result.trained:
                what = t.refused or t.wrong or f"{t.error:.0e}"
                print(f"{result.name:20} {t.strategy:14} {t.plan:16} {what[:400]}", flush=True)
    trains, seconds = sum(each.trains for each in results), sum(each.seconds for each in results)
    print(f"{trains} of {len(results)} train; {seconds:.0f} s of CPU")
    if args.page:
        before = args.page.read_text(encoding="utf-8").partition(HEADING)[0].rstrip()
        args.page.write_text(f"{before}\n\n{page(results)}", encoding="utf-8")
    return int(any(each.wrong for result in results for each in result.trained))


if __name__ == "__main__":
    sys.exit(main())
