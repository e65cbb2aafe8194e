"""What was measured at each place, its statistics, their table, and the file that a campaign resumes from.

    ratio      seconds of DDP's step by those of a side's in the same alternation
    interval   95 % of the medians of ratios drawn anew (bootstrap over the pairs)
    bound      seconds that a step takes at least: of the rank that has the most to do, the larger of its processor time
               (computing, and what its transfers take of it) by its share of the processors, and the bytes of the
               frames that its link carried, the busier way, by the rate; payload is 0.955 of frames of 1500 bytes

Runs beside which other processes had too much of the processors are in the file, and count nowhere.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tabulate import tabulate

from benchmarks.errors import BenchmarkError
from benchmarks.figures import run_of
from benchmarks.overlap.sides import BASE, Place
from benchmarks.session import Run

SCHEMA = 1
DRAWS = 2000

Alternation = Mapping[str, Run]


@dataclass(frozen=True)
class Measured:
    """A place as far as it came.

    batch: examples of a rank; image: their pixels a side.  cpus: processors that the ranks share.  foreign: the limit
    that disturbed runs exceed.  cluster: as calibrated, TOML.  plans, predicted: of splitc's sides, their JSON and
    simulated step seconds.  missing: why a side was not measured.  alternations: runs by side.
    """

    place: Place
    batch: int
    cpus: float
    foreign: float
    image: int = 224
    cluster: str = ""
    plans: Mapping[str, str] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    alternations: tuple[Alternation, ...] = ()

    def runs(self, side: str) -> list[Run]:
        """Those that nothing disturbed."""
        found = [each[side] for each in self.alternations if side in each]
        return [run for run in found if run.foreign <= self.foreign]

    def ratios(self, side: str, base: str = BASE) -> list[float]:
        """Seconds of `base` by those of `side`, of every alternation in which both are undisturbed."""
        pairs = [(each[base], each[side]) for each in self.alternations if base in each and side in each]
        return [b.step_seconds / s.step_seconds for b, s in pairs if max(b.foreign, s.foreign) <= self.foreign]

    def bound(self, side: str) -> float:
        """The median over the runs (s)."""
        share = self.cpus / self.place.world
        return statistics.median(
            max(max(run.processor) / share, max(*run.carried, *run.arrived) / self.place.bandwidth)
            for run in self.runs(side)
        )

    def seconds(self, side: str) -> float:
        """Of a step, the median over the runs."""
        return statistics.median(run.step_seconds for run in self.runs(side))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of the medians of as many ratios, drawn from these again and again, lie."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[round(0.025 * (DRAWS - 1))], medians[round(0.975 * (DRAWS - 1))]


class Figures:
    """All places, in a file that is written anew after each alternation."""

    def __init__(self, file: Path) -> None:
        """Raises BenchmarkError when the file holds anything else."""
        self._file = file
        self.about: dict[str, str] = {}
        self.places: dict[Place, Measured] = {}
        if not file.exists():
            return
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise BenchmarkError(f"{file} has another schema than {SCHEMA}; measure into another file")
            self.about = data["about"]
            for each in data["places"]:
                each["place"] = Place(**each["place"])
                each["alternations"] = tuple(
                    {side: run_of(run) for side, run in runs.items()} for runs in each["alternations"]
                )
                self.places[each["place"]] = Measured(**each)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchmarkError(f"{file} holds no figures of benchmarks.overlap: {error!r}") from error

    def put(self, measured: Measured) -> None:
        """Replace what was known of a place, and write the file."""
        self.places[measured.place] = measured
        data = {"schema": SCHEMA, "about": self.about, "places": [asdict(each) for each in self.places.values()]}
        partial = self._file.with_name(self._file.name + ".partial")
        partial.write_text(json.dumps(data) + "\n", encoding="utf-8")
        partial.replace(self._file)

    def forget(self, side: str) -> None:
        """Drop the runs of a side, of which there is another version now."""
        for measured in list(self.places.values()):
            kept = tuple({name: run for name, run in each.items() if name != side} for each in measured.alternations)
            self.put(replace(measured, alternations=kept))


def report(figures: Figures, against: Mapping[str, str]) -> str:
    """A table of all places, and what is missing.  against: side -> the script it is compared with, besides DDP."""
    sections = [f"{what}: {words}" for what, words in figures.about.items()]
    places = sorted(figures.places.items())
    inputs = dict.fromkeys(f"{each.batch} examples a rank, {each.image} x {each.image}" for _, each in places)
    sections += [*inputs, _table(places, against)] if places else []
    missing = [f"- not measured: {place} {s}: {w.splitlines()[0]}" for place, m in places for s, w in m.missing.items()]
    return "\n\n".join([*sections, "\n".join(missing)]).rstrip()


def _table(places: Sequence[tuple[Place, Measured]], against: Mapping[str, str]) -> str:
    rows = []
    for place, measured in places:
        for name in dict.fromkeys(name for each in measured.alternations for name in each if measured.ratios(name)):
            seconds, bound, predicted = measured.seconds(name), measured.bound(name), measured.predicted.get(name)
            rows.append(
                (
                    place,
                    name,
                    f"{seconds * 1e3:.0f} ms",
                    _ratio(measured.ratios(name)) if name != BASE else "",
                    _ratio(measured.ratios(name, against[name])) if against.get(name) else "",
                    f"{bound * 1e3:.0f} ms",
                    f"{seconds / bound:.2f}",
                    "" if predicted is None else f"{predicted / seconds - 1:+.1%}",
                    len(measured.ratios(name)),
                )
            )
    headers = ("place", "side", "step", "times DDP", "times by hand", "bound", "step/bound", "simulated", "pairs")
    return tabulate(rows, headers, tablefmt="pipe", colalign=("left", "left", *["right"] * 7), disable_numparse=True)


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"
