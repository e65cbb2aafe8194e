"""The page of the table: totals, a row for each model, what was refused and why."""

from __future__ import annotations

import datetime
import textwrap
from collections import Counter
from collections.abc import Sequence
from statistics import median

import torch

from benchmarks.real_models.measure import Result


def line(result: Result) -> str:
    """One line for a terminal."""
    seconds = "" if result.seconds is None else f"{result.seconds:.1f} s ({result.validation:.1f} validation)"
    return f"{result.name:26} {seconds:28} {outcome(result)}"


def outcome(result: Result) -> str:
    """`equal, trained`, or the stage that failed and its error."""
    if result.failed:
        return f"{result.failed}: {result.why}"
    return "equal, trained"


INTRODUCTION = """\
# Real models

Written by `python -m benchmarks.real_models --table docs/measurements/real-models.md`, with the packages of
`benchmarks/real_models/requirements.txt`; the models are those of `benchmarks/real_models/zoo/`. Each has random
weights and a small configuration, is compiled in train mode for 4 ranks under `auto`, and compared and trained:

- **equal**: one step of data parallelism on two ranks against the eager model, by code apart from `verify`
  (`benchmarks/real_models/eager.py`): loss, every gradient, every parameter and buffer after it. Its error is at most
  1e-8 in float64; 1e-3 in float32 where the model cannot run in float64; and where the model computes in float32
  inside, ten times what another order or division of the examples changes in eager.
- **trained**: `verify` holds under `auto` and under two strategies asked for, one of which separates or divides layers.
- **own code**: a part that cannot be traced and runs as it is, with its share of parameters and FLOPs.
"""


def page(results: Sequence[Result], missing: Sequence[str]) -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        *_totals(results, missing),
        *_exceptions(results),
        "",
        *_rows(results),
        "",
        *_regions(results),
        *_failures(results),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _totals(results: Sequence[Result], missing: Sequence[str]) -> list[str]:
    """Date, versions, totals."""
    batched = [r for r in results if r.batched]
    captured = [r for r in batched if r.captured]
    packages = Counter(r.package for r in results)
    today = datetime.date.today().isoformat()
    refused = sum(r.failed == "compile" for r in results if not r.batched)
    text = [
        f"{today}, torch {torch.__version__}, {len(results)} models of {len(packages)} packages, "
        f"{sum(r.seconds_in_all for r in results) / 60:.0f} minutes of CPU:",
        "",
        f"- With a batch dimension: {len(batched)}; captured {_share(len(captured), len(batched))}, equal "
        f"{_share(sum(r.equal for r in batched), len(batched))}, trained "
        f"{_share(sum(r.trains for r in batched), len(batched))}.",
        f"- Without one: {len(results) - len(batched)}, of which {refused} are refused for it.",
    ]
    if captured:
        total = [r.seconds or 0.0 for r in captured]
        beside = {r.name: (r.seconds or 0.0) - r.validation for r in captured}
        slowest = max(beside, key=lambda name: beside[name])
        large, some = sum(r.regions.large for r in captured), sum(r.regions.number > 0 for r in captured)
        text += [
            f"- CPU seconds of a compile: median {median(total):.1f}; besides validation median "
            f"{median(beside.values()):.1f}, most {beside[slowest]:.1f} ({slowest}).",
            f"- Own code in {some} models; more than a tenth of parameters or FLOPs in {_share(large, len(captured))}.",
        ]
    if missing:
        text.append(f"- Left out, not installed: {', '.join(missing)}.")
    return text


def _share(count: int, whole: int) -> str:
    return f"{count} ({count / max(whole, 1):.0%})"


def _rows(results: Sequence[Result]) -> list[str]:
    """The table: a row for each package."""
    rows = [
        "| package | models (chosen for) | largest error in float64 | longest compile, CPU s (of it validation) |",
        "| --- | --- | ---: | ---: |",
    ]
    for package in dict.fromkeys(r.package for r in results):
        some = [r for r in results if r.package == package]
        errors = [r.error for r in some if r.error is not None and r.dtype == "float64"]
        error = f"{max(errors):.0e}" if errors else ""
        slowest = max((r for r in some if r.captured), key=lambda r: r.seconds or 0.0, default=None)
        seconds = "" if slowest is None else f"{slowest.seconds:.1f} ({slowest.validation:.1f})"
        rows.append(f"| {package} | {', '.join(map(_model, some))} | {error} | {seconds} |")
    return rows


def _model(result: Result) -> str:
    """Its name, in bold where a stage failed or `verify` does not hold, and what it was chosen for."""
    name = result.name if result.trains and not result.failed else f"**{result.name}**"
    return f"{name} ({result.shows})" if result.shows else name


def _exceptions(results: Sequence[Result]) -> list[str]:
    """What is in bold in the table or not in float64, by name."""
    single = [
        r.name if r.dtype == "float64" else f"{r.name} (error {r.error:.0e})"
        for r in results
        if r.captured and any(t.dtype != "float64" for t in r.trained)
    ]
    missed = [f"{r.name} ({', '.join(_missed(r))})" for r in results if r.captured and not r.trains]
    lines = [f"- Trained in float32: {', '.join(single)}."] if single else []
    lines += [f"- Not under three strategies that hold: {'; '.join(missed)}."] if missed else []
    return [textwrap.fill(each, 120, subsequent_indent="  ", break_on_hyphens=False) for each in lines]


def _missed(result: Result) -> list[str]:
    """The strategies that do not hold; else the few there are."""
    wrong = [f"{t.strategy.partition('(')[0]} wrong" for t in result.trained if not t.holds]
    return wrong or [f"auto and {name} alone" for name in _names(result) if name != "auto"]


def _names(result: Result) -> list[str]:
    return [t.strategy.partition("(")[0] for t in result.trained]


def _regions(results: Sequence[Result]) -> list[str]:
    """The lines that made regions."""
    rows = [
        f"| {r.name} | {r.regions.number} | {r.regions.parameters:.0%} | {r.regions.flops:.0%} | {why} |"
        for r in results
        for why in r.regions.why
    ]
    head = ["| model | parts | of parameters | of FLOPs | why |", "| --- | ---: | ---: | ---: | --- |"]
    return ["## Own code", "", *head, *rows, ""] if rows else []


def _failures(results: Sequence[Result]) -> list[str]:
    """What did not work, and why."""
    failed = [r for r in results if r.failed]
    if not failed:
        return []
    rows = (f"| {r.name} | {r.failed} | {r.why} |" for r in failed)
    return ["## Refused or failed", "", "| model | at | why |", "| --- | --- | --- |", *rows]
