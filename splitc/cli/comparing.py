"""What each rank of a measured run did beside what was predicted, and how far the prediction is off.

error = (predicted - measured) / measured, of the medians over all steps after the warm-up.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tabulate as tables

from splitc import units
from splitc.cli.correcting import Factors
from splitc.errors import LaunchError
from splitc.ir.phases import Phases, Span
from splitc.ir.plan import SERVER, Plan

WIDTH = 80
_SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "compute": ("compute", units.seconds),
    "waiting": ("waiting", units.seconds),
    "communication": ("communication", units.seconds),
    "sent_bytes": ("sent", units.nbytes),
    "step": ("step", units.seconds),
}
NO_PREDICTION = "the build's plan.json has no predicted phases; compile the model again with this splitc to have them"


@dataclass(frozen=True)
class Measurement:
    """What a run measured: medians for each rank, and of its last steps the spans.

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


def read_measurement(path: Path) -> Measurement:
    """What `launch.py --measure` wrote.  Raises LaunchError when that is not there or not complete."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        steps = [[dict(each) for each in step["phases"]] for step in data["steps"]]
        betweens = [max(each["between"] for each in step) for step in steps]
        periods = [max(each["step"] + each.pop("between") for each in step) for step in steps]
        phases = [[Phases(**each) for each in step] for step in steps]
        longest = [max(each.step for each in step) for step in phases]
        return Measurement(
            ranks=tuple(_median(of_rank) for of_rank in zip(*phases, strict=True)),
            spans=tuple(Span(**span) for span in data["spans"]),
            examples=int(statistics.median(step["examples"] for step in data["steps"])),
            period=statistics.median(periods),
            between=statistics.median(betweens),
            fastest=min(longest),
            slowest=max(longest),
            steps=len(steps),
            warm_up=data["warm_up"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(
            f"the ranks left no measurement ({type(error).__name__}: {error}); was the build's launch.py edited? "
            f"compile the model again"
        ) from error


def _median(steps: Sequence[Phases]) -> Phases:
    """Each of its numbers by itself."""
    names = [field.name for field in fields(Phases) if field.name != "rank"]
    return Phases(steps[0].rank, **{name: statistics.median(getattr(step, name) for step in steps) for name in names})


def error_of(predicted: float, measured: float) -> float | None:
    """By how much of what was measured the prediction is off; None where nothing was measured."""
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return (predicted - measured) / measured


def predicted_rate(plan: Plan) -> float:
    """Samples/s by the predicted phases, else by the planner's price of a step; 0 where there is neither."""
    slowest = max((phases.step for phases in plan.prediction.phases), default=plan.step_seconds)
    return plan.global_batch / slowest if slowest else 0.0


def as_text(name: str, plan: Plan, measured: Measurement) -> str:
    """The table and the lines under it, in at most 80 columns."""
    rows = [row for phases in measured.ranks for row in _rows(plan, phases)]
    headers = ["rank", "roles", "of a step", "predicted", "measured", "error"]
    table: str = tables.tabulate(
        rows, headers, disable_numparse=True, colalign=("left", "left", "left", "right", "right", "right")
    )
    predicted = predicted_rate(plan)
    error = error_of(predicted, measured.samples_per_second) if predicted else None
    beside = f"predicted {predicted:,.0f}, " if predicted else ""
    lines = [
        f"{name}: plan {plan.hash} on {plan.world} rank{'s' * (plan.world > 1)}, "
        f"predicted for cluster {plan.prediction.cluster}; "
        f"medians of {measured.steps} step{'s' * (measured.steps > 1)} after {measured.warm_up} of warm-up; "
        f"error = (predicted - measured) / measured",
        "",
        *(line.rstrip() for line in table.splitlines()),
        "",
        f"samples/s: {beside}measured {measured.samples_per_second:,.0f}{'' if error is None else f', {_off(error)}'}",
        f"steps took {units.seconds(measured.fastest)} to {units.seconds(measured.slowest)}",
    ]
    if measured.between > 0.02 * measured.period:
        lines.append(
            f"between two steps {units.seconds(measured.between)} pass, for the data above all, which nobody predicted"
        )
    if not plan.prediction.phases:
        lines.append(NO_PREDICTION)
    elif measured.examples != plan.global_batch:
        lines.append(
            f"the data gave {measured.examples} examples a step, the prediction is for {plan.global_batch}: the errors "
            f"mean little"
        )
    return "\n".join(textwrap.fill(line, WIDTH) if len(line) > WIDTH else line for line in lines)


def _rows(plan: Plan, measured: Phases) -> list[list[str]]:
    predicted = plan.prediction.phases[measured.rank] if plan.prediction.phases else None
    rows = []
    for key, (what, shown) in _SHOWN.items():
        value = getattr(measured, key)
        if predicted is None:
            rows.append(["", "", what, "", shown(value), ""])
            continue
        expected = getattr(predicted, key)
        error = error_of(expected, value)
        rows.append(["", "", what, shown(expected), shown(value), "" if error is None else _off(error)])
    rows[0][:2] = str(measured.rank), textwrap.shorten(", ".join(roles_of(plan, measured.rank)), 20, placeholder="..")
    return rows


def _off(error: float) -> str:
    """`+5.2 %`; more than tenfold as a factor, `31x`."""
    if error == 0:
        return "0 %"
    if error >= 10:
        return f"{error + 1:.0f}x"
    return f"{100 * error:+.0f} %" if abs(error) >= 0.0995 else f"{100 * error:+.1f} %"


def roles_of(plan: Plan, rank: int) -> tuple[str, ...]:
    """The roles of a rank, of a server too."""
    return (plan.roles_of(rank) + ((SERVER,) if rank in plan.servers else ())) or ("idle",)


def as_data(plan: Plan, measured: Measurement, factors: Factors | None) -> dict[str, Any]:
    """The same as data for --json, schema 1."""
    ranks = []
    for phases in measured.ranks:
        predicted = plan.prediction.phases[phases.rank] if plan.prediction.phases else None
        errors = {key: error_of(getattr(predicted, key), getattr(phases, key)) for key in _SHOWN} if predicted else None
        ranks.append(
            {
                "rank": phases.rank,
                "roles": list(roles_of(plan, phases.rank)),
                "predicted": _numbers(predicted) if predicted else None,
                "measured": _numbers(phases),
                "error": errors,
            }
        )
    rate = predicted_rate(plan)
    return {
        "schema": 1,
        "plan": plan.hash,
        "cluster": plan.prediction.cluster,
        "steps": measured.steps,
        "warm_up": measured.warm_up,
        "examples": measured.examples,
        "ranks": ranks,
        "fastest_step": measured.fastest,
        "slowest_step": measured.slowest,
        "between_steps": measured.between,
        "samples_per_second": {
            "predicted": rate or None,
            "measured": measured.samples_per_second,
            "error": error_of(rate, measured.samples_per_second) if rate else None,
        },
        "factors": asdict(factors) if factors is not None else None,
    }


def _numbers(phases: Phases) -> dict[str, float]:
    return {key: getattr(phases, key) for key in _SHOWN}
