"""What was measured in each cell, its statistics, their tables, and the file that a campaign resumes from.

    ratio      seconds of a choice's step by those of another plan's in the same round
    regret     the largest median of the ratios, less 1: how much faster the fastest plan is than the choice
    interval   95 % of the medians of ratios drawn anew (bootstrap over the rounds), less 1
    beyond     the lower end of the interval, where it is above 0: the regret that noise does not explain
    simulated  predicted / measured - 1, of every plan that ran

All plans of a cell are measured once, briefly; only rounds, in which the best run in an order drawn anew, tell regret.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.errors import BenchmarkError
from benchmarks.overlap.figures import interval
from benchmarks.overlap.sides import Place
from splitc.ir.plan import Plan

SCHEMA = 1
AUTO, TUNED, ONE = "auto", "tuned", "single_device"
SCRIPTS = {"DDP": "ddp", "sparse DDP": "sparse_ddp"}
"""Written by hand: side -> its name among `by_hand`."""


@dataclass(frozen=True, order=True)
class Cell:
    """A model of `cases.MODELS`, and where it trains."""

    model: str
    place: Place

    def __str__(self) -> str:
        return f"{self.model}@{self.place}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """`alexnet@11@82Mbit`.  Raises BenchmarkError for anything else."""
        model, at, place = text.partition("@")
        if not model or not at:
            raise BenchmarkError(f"{text!r} is no cell; write model, ranks and rate, as in alexnet@11@82Mbit")
        return cls(model, Place.parse(place))


@dataclass(frozen=True)
class Side:
    """A plan of a cell, or a script.

    asked: what it is the plan of, `auto`, `tuned`, `layer_separation(microbatches=4)`.  plan: its JSON.  predicted:
    simulated seconds of a step; first: measured ones, of the brief run.  why: it could not be run.
    """

    asked: tuple[str, ...]
    plan: str = ""
    predicted: float = 0.0
    first: float = 0.0
    why: str = ""

    @property
    def name(self) -> str:
        """`late_multiply`, `layer_separation 3 + 1, 4 microbatches`."""
        if not self.plan:
            return self.asked[0]
        plan = Plan.from_json(self.plan)
        sizes = " + ".join(str(len(ranks)) for ranks in dict.fromkeys(plan.decided.roles.values()))
        pieces = f", {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        return plan.strategy + f" {sizes}" * ("+" in sizes) + pieces + ", 1F1B" * (plan.schedule == "1f1b")


@dataclass(frozen=True)
class Regret:
    """Of a choice.  low, high: of the interval.  best: the side that is faster, None where the choice is the best."""

    regret: float
    low: float
    high: float
    best: int | None = None

    @property
    def beyond(self) -> float:
        return max(0.0, self.low)


@dataclass(frozen=True)
class Measured:
    """A cell as far as it came.

    examples: of a global batch, the same for all.  missing: what has no plan -> why.  rounds: seconds by the numbers of
    the sides.  disturbed: runs that count although other processes had more of the processors than they should.
    tuning: seconds of planning and running finalists, and how each ran; or why it failed.
    """

    cell: Cell
    examples: int
    sides: tuple[Side, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    rounds: tuple[Mapping[int, float], ...] = ()
    disturbed: int = 0
    tuning: Mapping[str, Any] = field(default_factory=dict)

    def number(self, asked: str) -> int | None:
        """The side that is what was asked for."""
        return next((k for k, side in enumerate(self.sides) if asked in side.asked), None)

    def times(self, k: int) -> list[float]:
        """Seconds of a side in the rounds, or those of its brief run."""
        first = self.sides[k].first
        return [each[k] for each in self.rounds if k in each] or [first] * (first > 0)

    def seconds(self, k: int) -> float:
        """Of a step, the median."""
        return statistics.median(self.times(k))

    def ratios(self, k: int, other: int) -> list[float]:
        """Seconds of a side by those of another one, of each round in which both ran."""
        return [each[k] / each[other] for each in self.rounds if k in each and other in each]

    @property
    def ran(self) -> list[int]:
        """The plans that were in rounds."""
        return [k for k, side in enumerate(self.sides) if side.plan and any(k in each for each in self.rounds)]

    def regret(self, asked: str) -> Regret | None:
        """Of auto's or the tuned plan; None where it was not measured."""
        own = self.number(asked)
        if own is None or own not in self.ran:
            return None
        ratios = {k: found for k in self.ran if k != own and (found := self.ratios(own, k))}
        best = max(ratios, key=lambda k: statistics.median(ratios[k]), default=None)
        if best is None or statistics.median(ratios[best]) <= 1:
            return Regret(0.0, 0.0, 0.0)
        low, high = interval(ratios[best])
        return Regret(statistics.median(ratios[best]) - 1, low - 1, high - 1, best)

    def error(self, k: int) -> float:
        return self.sides[k].predicted / self.seconds(k) - 1


class Figures:
    """All cells and clusters, in a file that is written anew after each run."""

    def __init__(self, file: Path) -> None:
        """Raises BenchmarkError when the file holds anything else."""
        self._file = file
        self.about: dict[str, str] = {}
        self.clusters: dict[str, str] = {}
        self.cells: dict[Cell, Measured] = {}
        if not file.exists():
            return
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise BenchmarkError(f"{file} has another schema than {SCHEMA}; measure into another file")
            self.about, self.clusters = data["about"], data["clusters"]
            for each in data["cells"]:
                each["cell"] = cell = Cell(each["cell"]["model"], Place(**each["cell"]["place"]))
                each["sides"] = tuple(Side(**{**side, "asked": tuple(side["asked"])}) for side in each["sides"])
                each["rounds"] = tuple({int(k): seconds for k, seconds in one.items()} for one in each["rounds"])
                self.cells[cell] = Measured(**each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(f"{file} holds no figures of benchmarks.choice: {error!r}") from error

    def put(self, measured: Measured) -> None:
        """Replace what was known of a cell, and write the file."""
        self.cells[measured.cell] = measured
        self.write()

    def write(self) -> None:
        cells = [asdict(each) for each in self.cells.values()]
        data = {"schema": SCHEMA, "about": self.about, "clusters": self.clusters, "cells": cells}
        partial = self._file.with_name(self._file.name + ".partial")
        partial.write_text(json.dumps(data) + "\n", encoding="utf-8")
        partial.replace(self._file)


# -- tables ------------------------------------------------------------------------------------------------------------


def report(figures: Figures) -> str:
    """The tables in Markdown, and what they come to."""
    known = [each for _, each in sorted(figures.cells.items())]
    cells = [each for each in known if each.regret(AUTO) is not None]
    parts = [_choices(cells), *_summaries(cells), _speeds(cells), _predictions(cells)] if cells else []
    lines = [f"- {side.name} on {each.cell} failed: {side.why}" for each in known for side in each.sides if side.why]
    lines += [f"- tuning of {each.cell} failed: {each.tuning['why']}" for each in known if "why" in each.tuning]
    lines += [f"- {each.cell} has no rounds of auto's plan yet" for each in known if each not in cells]
    return "\n\n".join([*parts, "\n".join(lines)]).rstrip() or "nothing was measured"


def _choices(cells: Sequence[Measured]) -> str:
    rows = []
    for each in cells:
        row: list[object] = [*_where(each), sum(bool(side.plan) and side.first > 0 for side in each.sides)]
        for asked in (AUTO, TUNED):
            own, found = each.number(asked), each.regret(asked)
            row += ["", ""] if found is None or own is None else [each.sides[own].name, _interval(found)]
        best = min(each.ran, key=each.seconds)
        rows.append([*row, each.sides[best].name, len(each.rounds)])
    heads = ("model", "ranks", "rate", "plans", "auto", "regret", "tuned", "regret", "best", "rounds")
    return _table(rows, heads)


def _summaries(cells: Sequence[Measured]) -> Iterable[str]:
    for asked in (AUTO, TUNED):
        found = [regret for each in cells if (regret := each.regret(asked)) is not None]
        if found:
            parts = (("regret", [each.regret for each in found]), ("beyond the interval", [e.beyond for e in found]))
            words = (f"{what}: median {statistics.median(some):.1%}, worst {max(some):.1%}" for what, some in parts)
            yield f"{asked}, {len(found)} cells: {'; '.join(words)}"


def _speeds(cells: Sequence[Measured]) -> str:
    """Samples/s, and how many times those of the scripts."""
    rows = []
    for each in cells:
        row: list[object] = list(_where(each))
        choices = [each.number(asked) for asked in (AUTO, TUNED)]
        sides = [*choices, min(each.ran, key=each.seconds), *(each.number(name) for name in (*SCRIPTS, ONE))]
        row += ["" if k is None or not each.times(k) else f"{each.examples / each.seconds(k):.0f}" for k in sides]
        for script in (each.number(name) for name in (*SCRIPTS, ONE)):
            for own in choices:
                ratios = each.ratios(script, own) if own is not None and script is not None else []
                row.append(_times(ratios) if ratios else "")
        rows.append(row)
    scales = (*SCRIPTS, ONE)
    times = [f"{asked}, times {scale}" for scale in scales for asked in (AUTO, TUNED)]
    return _table(rows, ("model", "ranks", "rate", AUTO, TUNED, "best", *scales, *times))


def _predictions(cells: Sequence[Measured]) -> str:
    """Errors by the number of ranks, of all plans that ran, of those in rounds and of auto's."""
    kinds: dict[str, Callable[[Measured], Iterable[int]]] = {
        "all plans": lambda each: [k for k, side in enumerate(each.sides) if side.plan and each.times(k)],
        "in rounds": lambda each: each.ran,
        "auto's": lambda each: [k for k in each.ran if AUTO in each.sides[k].asked],
    }
    rows = []
    for world in sorted({each.cell.place.world for each in cells}):
        row: list[object] = [world]
        for numbers in kinds.values():
            some = [each.error(k) for each in cells if each.cell.place.world == world for k in numbers(each)]
            worst = max(some, key=abs)
            row += [len(some), f"{statistics.median(map(abs, some)):.1%}", f"{worst:+.1%}"]
        rows.append(row)
    return _table(rows, ("ranks", *(head for kind in kinds for head in (f"simulated, {kind}", "median", "worst"))))


def _where(each: Measured) -> tuple[object, ...]:
    return each.cell.model, each.cell.place.world, each.cell.place.rate


def _table(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    return tabulate(rows, heads, tablefmt="pipe", disable_numparse=True)


def _interval(found: Regret) -> str:
    return "0.0%" if found.best is None else f"{found.regret:.1%} [{found.low:.1%}, {found.high:.1%}]"


def _times(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]"
