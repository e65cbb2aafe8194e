"""What is measured: places (ranks and the rate of their links), and the sides that meet there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.layout import parse_rate
from splitc.ir.placements import Placement

BASE = "DDP"


@dataclass(frozen=True, order=True)
class Place:
    """A number of ranks, and the rate of each one's link as `parse_rate` takes it."""

    world: int
    rate: str

    def __str__(self) -> str:
        return f"{self.world}@{self.rate}"

    @property
    def bandwidth(self) -> float:
        """Bytes/s of frames, both ways."""
        return parse_rate(self.rate)

    @classmethod
    def parse(cls, text: str) -> Place:
        """`8@105Mbit`.  Raises BenchmarkError for anything else."""
        world, at, rate = text.partition("@")
        if not at or not world.isdecimal() or int(world) < 2:
            raise BenchmarkError(f"{text!r} is no place; write ranks and rate, as in 8@105Mbit")
        parse_rate(rate)
        return cls(int(world), rate)


@dataclass(frozen=True)
class Side:
    """A way to train.

    script: one of `by_hand`, with its options.  strategy: of splitc in its text form, with {world} and {trunk} (all
    ranks but one) in it, and pins; or plan: the file of a plan.json.  against: the script that it should be as fast as.
    places: where it is measured by default, everywhere if there are none.
    """

    name: str
    script: str = ""
    options: Mapping[str, int] = field(default_factory=dict)
    strategy: str = ""
    pins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plan: str = ""
    against: str = ""
    places: tuple[str, ...] = ()

    def strategy_on(self, world: int) -> str:
        """The strategy for so many ranks."""
        return self.strategy.format(world=world, trunk=world - 1)

    def placements(self) -> dict[str, str | Placement]:
        """The pins.  Raises BenchmarkError for a part that pins do not have."""
        known = {each.name for each in fields(Placement)}
        if unknown := sorted({part for pin in self.pins.values() for part in pin} - known):
            raise BenchmarkError(f"pins have no {', '.join(unknown)}")
        return {pattern: Placement(**pin) for pattern, pin in self.pins.items()}


PLACES = [Place(4, "230Mbit"), Place(4, "100Mbit"), Place(8, "105Mbit"), Place(11, "82Mbit")]

_FEW, _SLOW, _MANY = ("4@230Mbit",), ("4@100Mbit",), ("8@105Mbit", "11@82Mbit")
_ROWS = {
    "classifier.[14]": {"split": "rows", "state": "features"},
    "classifier.6": {"split": "rows", "state": "batch"},
}
_SEPARATION = "layer_separation(n_c={trunk},n_f=1"
_LATE, _BY_ROWS, _APART = "late multiply, by hand", "rows, by hand", "separation, 4 microbatches, by hand"

SIDES = [
    Side(BASE, script="ddp"),
    Side("data_parallel", strategy="data_parallel", places=(*_FEW, *_SLOW, "8@105Mbit")),
    Side(_LATE, script="late_multiply", places=_FEW),
    Side("late_multiply", strategy="late_multiply", against=_LATE, places=_FEW),
    Side(_BY_ROWS, script="rows", places=_SLOW),
    Side("rows", strategy="modulo_shard(mp={world})", pins=_ROWS, against=_BY_ROWS, places=_SLOW),
    Side(
        "rows, 2 microbatches",
        strategy="modulo_shard(mp={world},microbatches=2)",
        pins=_ROWS,
        against=_BY_ROWS,
        places=_SLOW,
    ),
    Side(_APART, script="separation", options={"microbatches": 4}, places=_MANY),
    Side("separation", strategy=_SEPARATION + ")", places=_MANY),
    Side("separation, 4 microbatches", strategy=_SEPARATION + ",microbatches=4)", against=_APART, places=_MANY),
    Side(
        "separation, 4 microbatches, 1F1B",
        strategy=_SEPARATION + ",microbatches=4,schedule=1f1b)",
        against=_APART,
        places=_MANY,
    ),
]
