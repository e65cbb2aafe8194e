"""The curves of a campaign: their points, what is read from them, and the file that a campaign resumes from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

FOREIGN = 0.05  # of the processors: a curve beside which other processes took more is disturbed


@dataclass(frozen=True)
class Point:
    """A curve after `samples` examples over all ranks.

    seconds: of training, evaluation left out.  accuracy, loss: on the held-out examples.  sent: bytes of the frames
    that a rank has put on its link, the mean over the ranks.
    """

    samples: int
    seconds: float
    accuracy: float
    loss: float
    sent: float


@dataclass(frozen=True)
class Key:
    """Which curve: a task, a number of ranks, a method by its name, and the seed of weights and order."""

    task: str
    world: int
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.world} ranks, {self.method}, seed {self.seed}"


@dataclass(frozen=True)
class Curve:
    """A measured curve.

    recipe: all that was set (model, batch, rate, samples): a curve of another recipe is not this one.  plan: what
    splitc chose.  foreign: fraction of the processors that other processes took meanwhile.
    """

    key: Key
    recipe: str
    plan: str
    foreign: float
    points: tuple[Point, ...]

    @property
    def final(self) -> float:
        """The accuracy at the end."""
        return self.points[-1].accuracy

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.points[-1].samples / self.points[-1].seconds

    @property
    def sent_per_sample(self) -> float:
        """Bytes that a rank sends for each example of the global batch."""
        return self.points[-1].sent / self.points[-1].samples

    def time_to(self, accuracy: float) -> float | None:
        """Seconds until the curve first reaches an accuracy; None where it never does.

        Linear between two points; the first one's where it is there already, for a round is not evaluated within.
        """
        before = self.points[0]
        for point in self.points:
            if point.accuracy >= accuracy:
                part = (accuracy - before.accuracy) / (point.accuracy - before.accuracy) if point is not before else 0.0
                return before.seconds + part * (point.seconds - before.seconds)
            before = point
        return None


@dataclass(frozen=True)
class Bed:
    """The network of a task on `world` ranks, fixed when its first curve is measured.

    compute: seconds that a rank computes for a step, T, while all compute.  rate: bytes/s of each link, P / (r_P T).
    cluster: the ranks at that rate, calibrated, as TOML.  about: the day and the machine.
    """

    task: str
    world: int
    compute: float
    rate: float
    cluster: str
    about: str


class Results:
    """The lines of a file: `Bed`s and `Curve`s, one each, added as soon as they are measured.

    Raises BenchmarkError for a file of anything else.  A last line that was cut off is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beds: dict[tuple[str, int], Bed] = {}
        self.curves: dict[Key, Curve] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self._take(_parsed(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise BenchmarkError(f"{path}:{number} is no line of a campaign; give another --out") from error

    def missing(self, wanted: Iterable[tuple[Key, str]]) -> list[Key]:
        """Those of the curves, each with its recipe, that still have to be measured."""
        return [key for key, recipe in wanted if key not in self.curves or self.curves[key].recipe != recipe]

    def add(self, record: Bed | Curve) -> None:
        """Write what was measured."""
        self._take(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": type(record).__name__.lower(), **asdict(record)}) + "\n")

    def _take(self, record: Bed | Curve) -> None:
        if isinstance(record, Bed):
            self.beds[record.task, record.world] = record
        else:
            self.curves[record.key] = record


def _parsed(line: dict[str, Any]) -> Bed | Curve:
    kind = line.pop("kind")
    if kind == "bed":
        return Bed(**line)
    if kind != "curve":
        raise ValueError(kind)
    points = tuple(Point(**point) for point in line.pop("points"))
    return Curve(key=Key(**line.pop("key")), points=points, **line)


def mean(values: Sequence[float]) -> float:
    """The mean; at least one value."""
    return sum(values) / len(values)
