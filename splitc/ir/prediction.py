"""The Prediction: what a plan is expected to cost, and why it was chosen.  It decides nothing."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

from splitc.ir.decode import Problem, at_least, decode, hints_of
from splitc.runtime.transport.phases import Phases, Span

BASES = ("measured", "interpolated", "extrapolated")
"""What a price follows from: the plan ran here; what it consists of did, or was calibrated; or neither."""


@dataclass(frozen=True)
class Candidate:
    """The best plan of one strategy.

    step_seconds: simulated (s); program_seconds: by the integer program, or a closed form.  samples_per_second:
    simulated, over all ranks.  why: it is infeasible.  error: the largest relative one (L2) of a gradient, as measured.
    """

    strategy: str
    step_seconds: float
    samples_per_second: float
    global_batch: int
    exact: bool
    feasible: bool
    why: str = ""
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    program_seconds: float = 0.0
    microbatches: int = 1
    error: float = 0.0


@dataclass(frozen=True)
class Tried:
    """A plan that tuning ran, and how it ran.

    plan: its hash.  predicted, measured: seconds of a step, measured the median of `turns`; spread: the relative
    standard deviation of a turn.  failed: why it was out.
    """

    name: str
    plan: str
    global_batch: int
    predicted: float
    measured: float = 0.0
    spread: float = 0.0
    turns: int = 0
    failed: str = ""


class Later(UserDict[str, Any]):
    """A mapping that `find` makes when it is first read."""

    def __init__(self, find: Callable[[], dict[str, Any]]) -> None:
        self._find = find

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]  # what UserDict reads
        return self._find()


@dataclass(frozen=True)
class Prediction:
    """The prices of a plan on a cluster.

    cluster: its name.  priced_on: digest of its description.  step_seconds: simulated when the plan was chosen (s);
    program_seconds: by the integer program, or a closed form, which proof and gap are of.  proof: "optimal", "gap" or
    "heuristic"; gap: how much faster another plan could be at most, as a fraction.
    layer_seconds: layer -> compute of its busiest rank in one step (s).  phases: of each rank's step, by simulation;
    none where nothing was simulated.  p50, p90: what half and nine tenths of the steps take at most (s); 0 where
    nothing varies.  priced: the best plan of every strategy that was priced to choose the plan; all: prices every
    strategy.  spans: simulates three steps, or rounds, and keeps what every rank does.  reasons: layer -> why it was
    placed so.  advice: what would put idle ranks to work.  tried: the plans that were run to choose this one.
    on_wire: the best exact plan, and the one in formats chosen.
    memory: what a step of each rank takes at most (bytes), an upper bound.  ranks_per_host: of the cluster.
    based_on: digest of the cluster before runs changed its numbers, by `factors`.  weights: of factors, as in
    `calibration/learning.py`.  basis: one of `BASES`.  ran: the measured step of this plan there (s); 0 if it did not.
    """

    cluster: str = ""
    proof: str = "optimal"
    gap: float = 0.0
    step_seconds: float = 0.0
    program_seconds: float = 0.0
    priced: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    layer_seconds: Mapping[str, float] = field(default_factory=dict)
    phases: tuple[Phases, ...] = ()
    priced_on: str = ""
    advice: str = ""
    tried: tuple[Tried, ...] = ()
    based_on: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    basis: str = ""
    ran: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    memory: tuple[Annotated[int, at_least(0)], ...] = ()
    ranks_per_host: Annotated[int, at_least(0)] = 0
    on_wire: tuple[Candidate, ...] = ()
    all: Callable[[], tuple[Candidate, ...]] | None = field(default=None, compare=False, repr=False)
    spans: Callable[[], tuple[Span, ...]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best plan of every strategy; priced when first read, unless the plan was chosen among all."""
        return self.priced if self.all is None else self.all()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "all": None, "spans": None, "weights": {**self.weights}}

    @property
    def simulated_seconds(self) -> float:
        """The simulated step of the slowest rank (s); 0 if nothing was simulated."""
        return max((phases.step for phases in self.phases), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The fields under their names in plan.json."""
        left_out = {*_NOT_DATA, *(name for name in _WHERE_KNOWN if not getattr(self, name))}
        found = asdict(replace(self, all=None, spans=None, weights={**self.weights}))
        for candidate in found["priced"]:
            del candidate["error"]  # which is of those `on_wire`
        return {KEYS.get(name, name): value for name, value in found.items() if name not in left_out}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> tuple[Prediction, list[Problem]]:
        """The inverse of `to_dict`, and what cannot be read; keys of other names are ignored."""
        names = {KEYS.get(each.name, each.name): each.name for each in fields(cls) if each.name not in _NOT_DATA}
        hints = {key: hints_of(cls)[name] for key, name in names.items()}
        values, problems = decode(hints, {key: value for key, value in data.items() if key in names})
        return cls(**{names[key]: value for key, value in values.items()}), problems


_NOT_DATA = ("all", "spans")
_WHERE_KNOWN = (
    *("tried", "on_wire", "p50", "p90", "memory", "ranks_per_host"),
    *("based_on", "factors", "weights", "basis", "ran"),
)
KEYS = {"layer_seconds": "seconds", "phases": "predicted", "priced": "candidates"}
"""Fields that have another name in plan.json."""

PREDICTION_KEYS = tuple(KEYS.get(each.name, each.name) for each in fields(Prediction) if each.name not in _NOT_DATA)
"""The keys of plan.json that predict and do not decide."""
