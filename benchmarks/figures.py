"""The figures of an accuracy campaign: what was measured and predicted for each cell, their table and their JSON.

    measured   the median of the runs' step seconds
    noise      half of the distance between the quartiles of the runs, over the median; of one run nothing is known
    error      predicted / measured - 1

The error of a set of cells is told by the median and the worst of their absolute values.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tabulate import tabulate

from benchmarks.errors import BenchmarkError
from benchmarks.session import Run

SCHEMA = 1
MEDIAN, WORST = 0.10, 0.25  # the errors that predictions should stay below
PREDICTIONS = {"roofline": "roofline", "closed": "program"}
"""What a step's seconds were predicted by: the key in the JSON -> the words in the table.

roofline: the simulation, with layers priced on the calibrated cluster.  closed: the price of the planner's integer
program, for information.
"""


@dataclass(frozen=True, order=True)
class Cell:
    """One place in the table.  rate: of each link, as `parse_rates` takes it, or "none"."""

    model: str
    strategy: str
    world: int
    rate: str

    def __str__(self) -> str:
        return f"{self.model} {self.strategy}, {self.world} ranks, {self.network}"

    @property
    def network(self) -> str:
        return "unshaped" if self.rate == "none" else self.rate


@dataclass(frozen=True)
class Result:
    """What is known of a cell.

    plan: its JSON.  predicted: by a key of `PREDICTIONS`, seconds.  why: there is no plan, or no measurement.
    """

    cell: Cell
    plan: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    why: str = ""

    @property
    def measured(self) -> float:
        return statistics.median(run.step_seconds for run in self.runs)

    @property
    def noise(self) -> float:
        seconds = [run.step_seconds for run in self.runs]
        if len(seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return (third - first) / 2 / self.measured

    def error(self, prediction: str) -> float:
        return self.predicted[prediction] / self.measured - 1

    def disturbed(self, limit: float) -> int:
        """The number of runs in which other processes took more than `limit` of the processors."""
        return sum(run.foreign > limit for run in self.runs)


@dataclass(frozen=True)
class Figures:
    """A campaign as far as it came.

    about: machine, versions and settings, in words.  clusters: `world rate` -> the calibrated cluster as TOML.
    residuals: likewise -> what was timed in calibration, with its seconds and those that the fitted numbers give.
    foreign: the limit that disturbed runs exceed.
    """

    about: Mapping[str, str]
    foreign: float
    clusters: Mapping[str, str]
    residuals: Mapping[str, Sequence[Mapping[str, Any]]]
    results: tuple[Result, ...]

    @property
    def measured(self) -> list[Result]:
        return [result for result in self.results if result.runs]

    def errors(self, prediction: str) -> dict[Cell, float]:
        """The error of every cell for which there is such a prediction."""
        return {r.cell: r.error(prediction) for r in self.measured if prediction in r.predicted}

    @property
    def within(self) -> bool:
        """Whether all cells were measured, and those priced by roofline are as near as they should be."""
        errors = [abs(error) for error in self.errors("roofline").values()]
        whole = len(errors) == len(self.results) > 0
        return whole and statistics.median(errors) <= MEDIAN and max(errors) <= WORST

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Figures:
        """Raises BenchmarkError when the text is none of `to_json`."""
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise BenchmarkError(f"{where} has another schema than {SCHEMA}; measure again")
            data["results"] = tuple(
                Result(**{**each, "cell": Cell(**each["cell"]), "runs": tuple(map(run_of, each["runs"]))})
                for each in data["results"]
            )
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(f"{where} holds no figures of a campaign: {error!r}") from error


def run_of(data: Mapping[str, Any]) -> Run:
    """The run that was written as JSON: lists become tuples again."""
    return Run(**{name: _tuples(value) for name, value in data.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def report(figures: Figures) -> str:
    """The table in Markdown, what it comes to, and what is missing in it."""
    measured = figures.measured
    shown = [key for key in PREDICTIONS if any(key in result.predicted for result in measured)]
    lines = [_table(figures, shown), ""] if measured else []
    lines += [
        table
        for world in sorted({result.cell.world for result in measured})
        for table in (by_model(figures, world), "")
    ]
    for key in shown:
        lines.append(_summary(PREDICTIONS[key], figures.errors(key)))
    if measured:
        noise = [result.noise for result in measured if len(result.runs) > 1] or [0.0]
        fewest, most = (pick(len(result.runs) for result in measured) for pick in (min, max))
        lines.append(
            f"- noise: median {statistics.median(noise):.1%}, worst {max(noise):.1%}, "
            f"runs of a cell: {fewest if fewest == most else f'{fewest} to {most}'}"
        )
        disturbed = sum(result.disturbed(figures.foreign) for result in measured)
        runs = sum(len(result.runs) for result in measured)
        lines.append(
            f"- other processes had more than {figures.foreign:.0%} of the processors in {disturbed} of {runs} runs"
        )
    lines += [
        f"- calibration of {_words(key)}: {_missed(residuals)}"
        for key, residuals in figures.residuals.items()
        if residuals
    ]
    missing = [result for result in figures.results if not result.runs]
    lines += [f"- not measured: {result.cell}: {result.why or 'stopped before'}" for result in missing]
    return "\n".join(lines)


def _table(figures: Figures, shown: Iterable[str]) -> str:
    headers = ["model", "strategy", "ranks", "network", "measured", "noise"]
    align = ["left", "left", "right", "left", "right", "right"]
    for key in shown:
        headers += [PREDICTIONS[key], "error"]
        align += ["right", "right"]
    rows = []
    for result in sorted(figures.measured, key=lambda each: each.cell):
        cell, marked = result.cell, "*" * bool(result.disturbed(figures.foreign))
        row = [cell.model, cell.strategy, cell.world, cell.network]
        row += [f"{result.measured * 1e3:.0f} ms{marked}", f"{result.noise:.1%}" if len(result.runs) > 1 else "-"]
        for key in shown:
            there = key in result.predicted
            row += [f"{result.predicted[key] * 1e3:.0f} ms", f"{result.error(key):+.1%}"] if there else ["", ""]
        rows.append(row)
    return tabulate(rows, headers, tablefmt="pipe", colalign=align, disable_numparse=True)


def by_model(figures: Figures, world: int) -> str:
    """Measured seconds and the error of the simulated ones: a row for each strategy and network, a column a model."""
    found = {result.cell: result for result in figures.measured if result.cell.world == world}
    models = sorted({cell.model for cell in found})
    rows = []
    for strategy, network in sorted({(cell.strategy, cell.network) for cell in found}):
        some = {cell.model: r for cell, r in found.items() if (cell.strategy, cell.network) == (strategy, network)}
        rows.append([strategy, network, *(_seconds_and_error(some.get(model)) for model in models)])
    head = [f"{world} ranks", "network", *models]
    align = ["left", "left", *["right"] * len(models)]
    return tabulate(rows, head, tablefmt="pipe", colalign=align, disable_numparse=True)


def _seconds_and_error(result: Result | None) -> str:
    if result is None:
        return ""
    error = f", {result.error('roofline'):+.1%}" if "roofline" in result.predicted else ""
    return f"{result.measured * 1e3:.0f} ms{error}"


def _words(key: str) -> str:
    """`2 none` -> `2 ranks, unshaped`."""
    world, _, rate = key.partition(" ")
    return f"{world} ranks, {'unshaped' if rate == 'none' else rate}"


def _missed(residuals: Sequence[Mapping[str, Any]]) -> str:
    """How far the fitted numbers are from what was timed."""
    missed = {each["what"]: each["fitted"] / each["measured"] - 1 for each in residuals}
    worst = max(missed, key=lambda what: abs(missed[what]))
    return f"fits miss by {statistics.median(map(abs, missed.values())):.1%}, at worst {missed[worst]:+.1%} ({worst})"


def _summary(words: str, errors: Mapping[Cell, float]) -> str:
    worst = max(errors, key=lambda cell: abs(errors[cell]))
    median = statistics.median(map(abs, errors.values()))
    return f"- {words}: error median {median:.1%}, worst {errors[worst]:+.1%} ({worst})"
