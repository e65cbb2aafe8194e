"""`splitc explain`: what other placements of a layer cost, where the choice of the plan flips, what is worth buying."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from splitc import units
from splitc.cli.compiling import analysed
from splitc.errors import LaunchError
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.report.alternatives import Alternative, alternatives, matching_layers
from splitc.report.buying import LEAST, changes
from splitc.report.tables import table, wrap
from splitc.report.what_if import breakpoints, choice_text, quantities
from splitc.runtime.progress import Step


def explain(args: argparse.Namespace) -> int:
    """Print the placements of a layer with their prices, where the choice of the plan flips, or what changes gain."""
    if (args.layer is not None) + args.sensitivity + args.buy != 1:
        raise LaunchError(
            "name a layer, or a pattern of layers, to price its placements; or ask for --sensitivity, or --buy"
        )
    if args.wire_error is not None:
        raise LaunchError("--wire-error measures the plan that is chosen; give explain the formats of that, --wire ...")
    _, settings, program = analysed(args, evaluation=False)
    place = settings.place()
    answer = _sensitivity if args.sensitivity else _buying if args.buy else _placements
    with Step(f"planning {program.name} anew", args.quiet):
        figures, text = answer(place, program, args.layer)
    head = {"schema": 1, "model": program.name, "world": place.world, "cluster": place.cluster.name}
    where = f"{program.name} on {units.numbered(place.world, 'rank')} of {place.cluster.name}: "
    print(json.dumps({**head, **figures}, indent=1) if args.json else f"{wrap(where + text[0])}\n{text[1]}")
    return 0


_Answer = tuple[dict[str, Any], tuple[str, str]]
"""The figures, and the text: a sentence and what follows it."""


def _sensitivity(place: Place, program: Program, _: None) -> _Answer:
    chosen, found = choice_text(place.run(program).plan), list(breakpoints(place, program))
    lines = []
    for each in quantities(place, program)[:4]:
        here = [at for at in found if at.quantity == each.name]
        flips = (f"{at.text}: {(at.choice or 'nothing fits') if at.flips else 'the same'}" for at in here)
        lines.append(wrap(f"{each.name}, now {each.text(each.now)}; {'; '.join(flips)}", "  "))
    return {"choice": chosen, "breakpoints": [asdict(each) for each in found]}, (chosen, "\n".join(lines))


def _buying(place: Place, program: Program, _: None) -> _Answer:
    now, found = changes(place, program)
    advised, rest = [c for c in found if c.gain >= LEAST], [c.what for c in found if c.gain < LEAST and not c.why]
    rows = [[c.what, "flips to " * c.flips + c.plan, f"{c.samples_per_second:,.0f}", f"{c.gain:+.0%}"] for c in advised]
    lines = [table("change|plan|#samples/s|#gain", rows, elastic=1)] if rows else []
    lines += [wrap(f"less than {LEAST:.0%} more: {', '.join(rest)}")] * bool(rest)
    lines += [wrap(f"{c.what}: {c.why}", "  ") for c in found if c.why]
    alone = now.plan.startswith("single_device")
    lines += [f"{'one process' if alone else 'what there is'} is enough: nothing is worth buying"] * (not advised)
    head = f"{now.plan}, {now.samples_per_second:,.0f} samples/s; planned anew with each change"
    figures = {"now": asdict(now), "changes": [{**asdict(c), "advised": c in advised} for c in found]}
    return figures, (head, "\n".join(lines))


def _placements(place: Place, program: Program, pattern: str) -> _Answer:
    found, layers = list(alternatives(place, program, pattern)), matching_layers(program, pattern)
    named = layers[0] if len(layers) == 1 else f"{pattern} ({len(layers)} layers, {layers[0]} to {layers[-1]})"
    sentence = f"{named} in each placement, with the rest chosen again; simulated; * is the plan that is chosen"
    return {"layers": layers, "placements": [asdict(each) for each in found]}, (sentence, alternatives_text(found))


def alternatives_text(found: Sequence[Alternative]) -> str:
    """A table of the placements that are possible, fastest first, and why others are not."""
    rows = []
    for each in sorted((each for each in found if not each.why), key=lambda each: -each.samples_per_second):
        figures = units.seconds(each.step_seconds), f"{each.samples_per_second:,.0f}"
        sent = units.nbytes(each.sent_bytes) if each.sent_bytes else ""
        rows.append([f"{'*' if each.chosen else ' '} {each.placement}", each.plan, *figures, sent, each.limit])
    text = table("  placement|plan|#step|#samples/s|#sends|limit", rows, elastic=1)
    reasons: dict[str, list[str]] = {}
    for each in found:
        reasons.setdefault(each.why, []).append(each.placement)
    return "\n".join([text, *(wrap(f"{'; '.join(names)}: {why}", "  ") for why, names in reasons.items() if why)])
