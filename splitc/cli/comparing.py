"""What a request reaches on each of several clusters, and whether that meets the bounds of `--require`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from splitc import units
from splitc.cli.compiling import compiled, compiled_on
from splitc.cli.names import cluster_names
from splitc.cli.options import UNITS
from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError, PlacementError
from splitc.ir.names import near_name
from splitc.report.figures import Figures
from splitc.report.tables import table, wrap
from splitc.tuned import title

QUANTITIES: Mapping[str, tuple[str, Mapping[str, float], Callable[[float], str]]] = {
    "step": ("step_seconds", {"S": 1.0, "MS": 1e-3, "US": 1e-6}, units.seconds),
    "samples/s": ("samples_per_second", {"": 1.0}, "{:,.0f}".format),
    "x DDP": ("times_ddp", {"": 1.0}, "{:.3g}".format),
    "memory": ("memory_bytes", UNITS, units.nbytes),
    "sends": ("sent_bytes", UNITS, units.nbytes),
}
"""Columns of the table: the key in JSON, the units of a bound, a value in words.  Bytes are of the rank with most."""


class Bound(NamedTuple):
    """A quantity that must be at least, or at most, a value."""

    text: str
    quantity: str
    least: bool
    value: float


def parse_bound(text: str) -> Bound:
    """Read `samples/s>=400` or `step <= 50ms`.  Raises LaunchError for what is malformed."""
    form = "write QUANTITY>=NUMBER or <=, above 0 and with its unit: 'samples/s>=400', 'step<=50ms', 'memory<=16GB'"
    match = re.fullmatch(r"\s*(.*?)\s*([<>]=)\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise LaunchError(f"--require {text}: {form}")
    names, asked = {name.lower().replace(" ", ""): name for name in QUANTITIES}, match[1].lower().replace(" ", "")
    if asked not in names:
        near = f"{near_name(asked, QUANTITIES)}there are {', '.join(QUANTITIES)}"
        raise LaunchError(f"--require {text}: unknown quantity {match[1]!r}; {near}")
    value = float(match[3]) * QUANTITIES[names[asked]][1].get(match[4].upper(), 0.0)
    if not value:
        raise LaunchError(f"--require {text}: {form}")
    return Bound(text.strip(), names[asked], match[2] == ">=", value)


def judged(texts: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whether each row meets each bound, for --json.  by: the part of the bound that it is off; None: not known."""
    found = []
    for bound, row in product(map(parse_bound, texts), rows):
        key, _, words = QUANTITIES[bound.quantity]
        by = None if (value := row[key]) is None else max(0.0, (value / bound.value - 1) * (-1 if bound.least else 1))
        much = "" if by is None else f"{by:,.{0 if by > 1 else 2}%}"
        how = "not known; not met" if by is None else f"{words(value)}; {f'not met, by {much}' if by else 'met'}"
        text = f"{row['cluster']}: {bound.text}: {bound.quantity} is {how}"
        found.append({"require": bound.text, "cluster": row["cluster"], "met": by == 0, "by": by, "text": text})
    return found


def told(judgements: Sequence[Mapping[str, Any]]) -> int:
    """Print them; returns the exit code, 1 where a bound is not met."""
    print("".join(f"{wrap(each['text'])}\n" for each in judgements), end="")
    return int(not all(each["met"] for each in judgements))


def best_of(args: argparse.Namespace) -> tuple[CompiledProgram, list[dict[str, Any]]]:
    """The program with the most samples/s of those on the clusters that are named, and a row of each, best first.

    Without bounds, a single cluster has no row.  Raises PlacementError where there is no plan on any.
    """
    bounds, names = [*map(parse_bound, args.require)], cluster_names(args)
    if len(names) == 1 and not bounds:
        return compiled(args), []
    made = [compiled(args)] if len(names) == 1 else compiled_on(args, names)
    both = [(_row(name, each), each) for name, each in zip(names, made, strict=True)]
    both.sort(key=lambda pair: -(pair[0]["samples_per_second"] or 0.0))
    if isinstance(best := both[0][1], PlacementError):
        raise best
    return best, [row for row, _ in both]


def _row(name: str | None, made: CompiledProgram | PlacementError) -> dict[str, Any]:
    if isinstance(made, PlacementError):
        why = "; ".join([str(made), *getattr(made, "__notes__", ())])
        return {"cluster": name, "plan": "", **dict.fromkeys(key for key, *_ in QUANTITIES.values()), "why": why}
    plan, figures = made.plan, Figures(made.program)
    ranks, rate = [figures.rank(rank) for rank in range(plan.world)], plan.step_seconds and plan.samples_per_second
    base = [c.samples_per_second for c in plan.candidates if c.strategy == "data_parallel" and c.feasible and rate]
    most = (max(rank[key] for rank in ranks) for key in ("memory_bytes", "sent_bytes"))
    values = plan.step_seconds or None, rate or None, rate / base[0] if base else None, *most
    of = {key: value for (key, *_), value in zip(QUANTITIES.values(), values, strict=True)}
    return {"cluster": name or plan.prediction.cluster, "plan": title(plan), **of, "why": ""}


def clusters_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of clusters."""
    cells = []
    for row in rows:
        figures = ("" if row[key] is None else words(row[key]) for key, _, words in QUANTITIES.values())
        cells.append([row["cluster"], row["plan"].partition(" ")[0] or "not possible", *figures])
    text = table("|#".join(["cluster|plan", *QUANTITIES]), cells)
    return "\n".join([text, *(wrap(f"{row['cluster']}: {row['why']}", "  ") for row in rows if row["why"])])
