"""`splitc diff`: what differs between two plans, in the words of the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from splitc import units
from splitc.cli.plan_file import read_plan_file
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.short_wire import wire_text
from splitc.report.tables import rank_list, runs, wrap


@dataclass(frozen=True)
class Difference:
    """What is one thing in one plan and another in the other; "" where a plan does not have it."""

    what: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before or 'none'} -> {self.after or 'none'}"


def diff(args: argparse.Namespace) -> int:
    """Print the differences; 0 when both plans decide the same, 1 when they differ."""
    plans = [read_plan_file(Path(path)) for path in (args.a, args.b)]
    before, after = plans
    finders = {"decided": decided, "layers": layers, "predicted": predicted}
    sections = {name: list(find(before, after)) for name, find in finders.items()}
    same = before.hash == after.hash
    if args.json:
        rows = {name: [asdict(each) for each in found] for name, found in sections.items()}
        print(json.dumps({"schema": 1, "equal": same, "plans": [plan.hash for plan in plans], **rows}, indent=1))
        return int(not same)
    for path, plan in zip((args.a, args.b), plans, strict=True):
        print(wrap(f"{path}: {plan.strategy} on {units.numbered(plan.world, 'rank')}, plan {plan.hash}"))
    print("both decide the same" if same else "they differ")
    for name, found in sections.items():
        if found:
            print("\n".join([f"\n{name}", *(wrap(str(each), "  ") for each in found)]))
    return int(not same)


def decided(before: Plan, after: Plan) -> Iterator[Difference]:
    """Yield what differs in all that decides the programs, but for the placements of layers."""
    a, b = before.decision, after.decision
    for key in {**a, **b}:
        if key == "placements" or a.get(key) == b.get(key):
            continue
        text = _TEXTS.get(key)
        parts = (text(plan) if text else _value(plan.decision.get(key, "")) for plan in (before, after))
        yield Difference(key.replace("_", " "), *parts)


def _value(value: Any) -> str:
    """Any other part of a plan; a list is of ranks."""
    return (rank_list(value) if value else "") if isinstance(value, tuple) else str(value)


def _examples(plan: Plan) -> str:
    """`384: conv 128, 128, 128; fc 384`."""
    batches = (f"{role} {runs([plan.batch(role, rank) for rank in ranks])}" for role, ranks in plan.roles.items())
    return f"{plan.global_batch}: {'; '.join(batches)}" if plan.batch_offsets else "of the model"


_TEXTS: Mapping[str, Callable[[Plan], str]] = {
    "roles": lambda plan: ", ".join(f"{role} on {rank_list(ranks)}" for role, ranks in plan.all_roles.items()),
    "examples": _examples,
    "groups": lambda plan: ", ".join(f"{role} in groups of {group.size}" for role, group in plan.groups.items()),
    "wire": lambda plan: wire_text(plan.wire),
    "sum_shares": lambda plan: ", ".join(map(str, plan.sum_shares)),
}
"""How parts of a plan are written that are no plain values."""


def layers(before: Plan, after: Plan) -> Iterator[Difference]:
    """Yield what differs in the placements; consecutive layers that differ alike together."""
    names = list({**before.placements, **after.placements})
    texts = {name: tuple(_placed(plan.placements.get(name)) for plan in (before, after)) for name in names}
    for (a, b), run in groupby(names, key=texts.__getitem__):
        found = list(run)
        if a != b:
            what = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]} ({len(found)} layers)"
            yield Difference(what, a, b)


def _placed(place: LayerPlacement | None) -> str:
    """`fc`, `all late_multiply`, `fc 1/4 by columns`; "" for a layer that a plan does not have."""
    if place is None:
        return ""
    held = f"1/{place.group} by {place.split}" if place.holding == "sharded" else place.holding
    held = held.removeprefix("replicated")
    states = (f"{part} {state}" for part, state in (("state", place.state), ("arrives", place.arrives)) if state)
    return " ".join(filter(None, (place.role, held, place.sync.replace("none", ""), *states)))


def predicted(before: Plan, after: Plan) -> Iterator[Difference]:
    """Yield what differs in the figures that both plans have, and first the numbers that they were priced on."""
    told = before.prediction, after.prediction
    of = [each.priced_on and f"{each.cluster} ({each.priced_on})" for each in told]
    if all(of) and told[0].priced_on != told[1].priced_on:
        yield Difference("cluster", *of)
    for (what, a, text), (_, b, _) in zip(_figures(before), _figures(after), strict=True):
        if a and b and a != b:
            yield Difference(what, text(a), f"{text(b)} ({b / a:.2f}x)")


def _figures(plan: Plan) -> Iterator[tuple[str, float, Callable[[float], str]]]:
    yield "step", plan.step_seconds, units.seconds
    yield "samples/s", plan.samples_per_second, "{:,.0f}".format
    yield "sent by the busiest rank", max((p.sent_bytes for p in plan.prediction.phases), default=0.0), units.nbytes
