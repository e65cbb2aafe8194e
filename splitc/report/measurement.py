"""Compare the measured phases of a run with the predicted ones: the figures, as data and as text.

error = (predicted - measured) / measured, of the medians over all steps after the warm-up; where ranks train in rounds,
over the means of as many consecutive steps as a round has, in which every exchange happens once.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from splitc import units
from splitc.errors import LaunchError
from splitc.ir.plan import Plan
from splitc.report.tables import table, wrap
from splitc.runtime.transport.phases import Phases, Span

MIN_SECONDS = 1e-3
"""Seconds of predicted communication below which its error says nothing about a link."""

_SHOWN = ("compute", "waiting", "communication", "sent_bytes", "step")


@dataclass(frozen=True)
class Measurement:
    """The measurement of a run: medians by rank, and the spans of the last steps.

    examples: of a step.  period: seconds from one step to the next, on the rank that is slowest in it; between: those
    that lie between two steps.  fastest, slowest: of all steps.  steps, warm_up: measured, and left out.
    """

    ranks: tuple[Phases, ...]
    spans: tuple[Span, ...]
    examples: int
    period: float
    between: float
    fastest: float
    slowest: float
    steps: int
    warm_up: int

    @property
    def samples_per_second(self) -> float:
        return self.examples / self.period


def read_measurement(path: Path, of_round: int = 1) -> Measurement:
    """Read what `launch.py --measure` wrote.  Raises LaunchError when it is missing or incomplete."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        steps = list(_means([[dict(each) for each in step["phases"]] for step in data["steps"]], of_round))
        betweens = [max(each["between"] for each in step) for step in steps]
        periods = [max(each["step"] + each.pop("between") for each in step) for step in steps]
        phases = [[Phases(**each) for each in step] for step in steps]
        longest = [max(each.step for each in step) for step in phases]
        ranks, spans = map(_median, zip(*phases, strict=True)), (Span(**span) for span in data["spans"])
        examples = int(statistics.median(step["examples"] for step in data["steps"]))
        took = statistics.median(periods), statistics.median(betweens), min(longest), max(longest)
        return Measurement(tuple(ranks), tuple(spans), examples, *took, len(data["steps"]), data["warm_up"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the ranks left no measurement ({type(error).__name__}: {error}); was the build's launch.py edited? "
            f"compile the model again"
        ) from error


def _means(steps: Sequence[Sequence[dict[str, Any]]], of_round: int) -> Iterator[list[dict[str, Any]]]:
    """The means of the numbers of every rank over each `of_round` consecutive steps."""
    for last in range(of_round, len(steps) + 1, of_round):
        by_rank = zip(*steps[last - of_round : last], strict=True)
        yield [{key: statistics.fmean(s[key] for s in of) for key in of[0]} | {"rank": of[0]["rank"]} for of in by_rank]


def _median(steps: Sequence[Phases]) -> Phases:
    """The median of each number."""
    return Phases(steps[0].rank, *map(statistics.median, zip(*(astuple(step)[1:] for step in steps), strict=True)))


def error_of(predicted: float, measured: float) -> float | None:
    """Relative error of a prediction; None where 0 was measured and something else predicted."""
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured


def as_json(plan: Plan, measured: Measurement, factors: Factors | None) -> dict[str, Any]:
    """All figures as data for --json, schema 1."""
    slowest = max((phases.step for phases in plan.prediction.phases), default=plan.step_seconds)
    rate = plan.global_batch / slowest if slowest else None  # samples/s by phases, else by the planner's step
    return {
        "schema": 1,
        "plan": plan.hash,
        "cluster": plan.prediction.cluster,
        "steps": measured.steps,
        "warm_up": measured.warm_up,
        "examples": measured.examples,
        "ranks": [_compared(plan, phases) for phases in measured.ranks],
        "fastest_step": measured.fastest,
        "slowest_step": measured.slowest,
        "between_steps": measured.between,
        "samples_per_second": {
            "predicted": rate,
            "measured": measured.samples_per_second,
            "error": error_of(rate, measured.samples_per_second) if rate else None,
        },
        "factors": asdict(factors) if factors is not None else None,
    }


def _compared(plan: Plan, phases: Phases) -> dict[str, Any]:
    """One rank's numbers, measured and predicted."""
    rank = phases.rank
    measured = {key: getattr(phases, key) for key in _SHOWN}
    predicted = errors = None
    if plan.prediction.phases:
        predicted = {key: getattr(plan.prediction.phases[rank], key) for key in _SHOWN}
        errors = {key: error_of(predicted[key], measured[key]) for key in _SHOWN}
    roles = plan.duties(rank) or ("idle",)
    return {"rank": rank, "roles": list(roles), "predicted": predicted, "measured": measured, "error": errors}


def as_text(name: str, plan: Plan, measured: Measurement) -> str:
    """The table and the lines under it, in at most 80 columns."""
    data = as_json(plan, measured, None)
    rows = [row for rank in data["ranks"] for row in _rows(rank)]
    head = (
        f"{name}: plan {plan.hash} on {plan.world} rank{'s' * (plan.world > 1)}, "
        f"predicted for cluster {plan.prediction.cluster}; "
        f"medians of {_medians(plan, measured)} after {measured.warm_up} of warm-up; "
        f"error = (predicted - measured) / measured"
    )
    shown = table("rank|roles|of a step|#predicted|#measured|#error", rows, elastic=1)
    return "\n".join([wrap(head), "", shown, "", *map(wrap, _notes(plan, measured, data["samples_per_second"]))])


def _medians(plan: Plan, measured: Measurement) -> str:
    """`12 steps`, or `2 rounds of 8 steps`."""
    number = measured.steps // plan.period
    return f"{number} {plan.cycle}{'s' * (number > 1)}" + f" of {plan.period} steps" * plan.trains_in_units


def _rows(rank: Mapping[str, Any]) -> list[list[str]]:
    """The lines of one rank's table; the first one names the rank and its roles."""
    rows = []
    for key in _SHOWN:
        shown = units.nbytes if key == "sent_bytes" else units.seconds
        predicted = shown(rank["predicted"][key]) if rank["predicted"] else ""
        error = None if rank["error"] is None else rank["error"][key]
        figures = predicted, shown(rank["measured"][key]), "" if error is None else _percent(error)
        rows.append(["", "", key.removesuffix("_bytes"), *figures])
    rows[0][:2] = str(rank["rank"]), textwrap.shorten(", ".join(rank["roles"]), 20, placeholder="..")
    return rows


def _notes(plan: Plan, measured: Measurement, rate: Mapping[str, float | None]) -> Iterator[str]:
    predicted = "" if rate["predicted"] is None else f"predicted {rate['predicted']:,.0f}, "
    error = "" if rate["error"] is None else f", {_percent(rate['error'])}"
    yield f"samples/s: {predicted}measured {measured.samples_per_second:,.0f}{error}"
    yield f"steps took {units.seconds(measured.fastest)} to {units.seconds(measured.slowest)}"
    if measured.between > 0.02 * measured.period:
        yield f"between two steps {units.seconds(measured.between)} pass, mostly for the data, which is not predicted"
    if not plan.prediction.phases:
        yield "the build's plan.json has no predicted phases; compile the model again with this splitc to have them"
    elif measured.examples != plan.global_batch:
        yield (
            f"the data gave {measured.examples} examples a step, the prediction is for {plan.global_batch}: the errors "
            f"mean little"
        )


def _percent(error: float) -> str:
    """`+5.2 %`; more than tenfold as a factor, `31x`."""
    if error == 0:
        return "0 %"
    if error >= 10:
        return f"{error + 1:.0f}x"
    return f"{100 * error:+.0f} %" if abs(error) >= 0.0995 else f"{100 * error:+.1f} %"


@dataclass(frozen=True)
class Factors:
    """How many times as long as predicted computing and transfers took; None where that is unknown.

    compute: of the sums over ranks.  communication: of those over ranks with more than 1 ms predicted.
    `learning.py` has the factors that change a cluster.
    """

    compute: float | None
    communication: float | None

    @property
    def empty(self) -> bool:
        return self.compute is None and self.communication is None


def factors_of(predicted: Sequence[Phases], measured: Sequence[Phases]) -> Factors:
    """Return measured over predicted.  Both sequences are indexed by rank."""
    pairs = list(zip(predicted, measured, strict=True))
    significant = [(p, m) for p, m in pairs if p.communication > MIN_SECONDS]
    return Factors(
        _ratio(sum(m.compute for _, m in pairs), sum(p.compute for p, _ in pairs)),
        _ratio(sum(m.communication for _, m in significant), sum(p.communication for p, _ in significant)),
    )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


def factors_in_words(factors: Factors, cluster: str) -> str:
    """`this machine computes 1.18 times slower than cluster v100-10gbe says, and ...`."""
    found = []
    if factors.compute is not None:
        found.append(f"this machine computes {_times(factors.compute)} cluster {cluster} says")
    if factors.communication is not None:
        source = "it" if found else f"cluster {cluster}"
        found.append(f"its transfers are {_times(factors.communication)} {source} says")
    else:
        least = units.seconds(MIN_SECONDS)
        found.append(f"no rank was predicted to communicate for more than {least} a step, too little to judge links by")
    return "; ".join(found)


def _times(factor: float) -> str:
    if abs(factor - 1) < 0.005:
        return "as fast as"
    return f"{factor:.2f} times slower than" if factor > 1 else f"{1 / factor:.2f} times faster than"
