"""The page of the table: totals, a row for each model, what was refused and why."""

from __future__ import annotations

import datetime
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
`benchmarks/real_models/requirements.txt`. Every model has random weights and a small configuration. It is compiled in
train mode for 4 ranks under `auto`, and then compared and trained:

- **error**: of one step of data parallelism on two ranks against the eager model, by code apart from `verify`
  (`benchmarks/real_models/eager.py`): loss, every gradient, every parameter and buffer after it. It is equal up to
  1e-8 in float64, up to 1e-3 in float32 where the model cannot run in float64, and where the model computes in float32
  inside, up to ten times what another order or division of the examples changes in eager.
- **trained**: `verify` holds under `auto` and under two strategies that were asked for, one of which separates or
  divides layers. In float64 unless it says otherwise.
- **regions**: parts that stay the user's own code, with their share of parameters and FLOPs.
"""


def page(results: Sequence[Result], missing: Sequence[str]) -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        *_totals(results, missing),
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
            f"- Regions in {some} models; more than a tenth of parameters or FLOPs in {_share(large, len(captured))}.",
        ]
    if missing:
        text.append(f"- Left out, not installed: {', '.join(missing)}.")
    return text


def _share(count: int, whole: int) -> str:
    return f"{count} ({count / max(whole, 1):.0%})"


def _rows(results: Sequence[Result]) -> list[str]:
    """The table."""
    rows = [
        "| model | package | parameters | regions | CPU seconds + validation | error | trained | chosen for |",
        "| --- | --- | ---: | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        of = r.regions
        regions = f"{of.number}: {of.parameters:.0%} of parameters, {of.flops:.0%} of FLOPs" if of.number else ""
        seconds = "" if r.seconds is None else f"{r.seconds - r.validation:.1f} + {r.validation:.1f}"
        error = "" if r.error is None else f"{r.error:.0e}{'' if r.dtype == 'float64' else ' (float32)'}"
        trained = "; ".join(_trained(r)) if r.captured else f"no: {r.failed}"
        cells = (r.name, r.package, _count(r.parameters), regions, seconds, error, trained, r.shows)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _trained(result: Result) -> list[str]:
    """`auto` with its plan, and the others by name; with their errors where they do not hold."""
    if not result.trained:
        return [f"no: {result.failed}"]
    found = []
    for t in result.trained:
        name = t.strategy.partition("(")[0]
        name = f"{name} ({t.what})" if name == "auto" and t.holds else name
        found.append(f"{name}{'' if t.dtype == 'float64' else ' in float32'}" if t.holds else f"**{name}: no**")
    return found


def _count(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 10_000 else str(number)


def _regions(results: Sequence[Result]) -> list[str]:
    """The lines that made regions."""
    lines = [f"| {r.name} | {why} |" for r in results for why in r.regions.why]
    return ["## What stays the user's own code", "", "| model | why |", "| --- | --- |", *lines, ""] if lines else []


def _failures(results: Sequence[Result]) -> list[str]:
    """What did not work, and why."""
    failed = [r for r in results if r.failed]
    if not failed:
        return []
    rows = (f"| {r.name} | {r.failed} | {r.why} |" for r in failed)
    return ["## Refused or failed", "", "| model | at | why |", "| --- | --- | --- |", *rows]
