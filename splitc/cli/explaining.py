"""`splitc explain`: what other placements of a layer would cost, and where the choice of the plan flips."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from splitc import units
from splitc.cli.compiling import analysed
from splitc.cli.progress import Step
from splitc.errors import LaunchError
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.report.alternatives import Alternative, alternatives, matching_layers
from splitc.report.tables import table, wrap
from splitc.report.what_if import Breakpoint, breakpoints, choice_text, quantities


def explain(args: argparse.Namespace) -> int:
    """Print the placements of a layer with their prices, or where the choice of the plan flips."""
    if (args.layer is None) != args.sensitivity:
        raise LaunchError("name a layer, or a pattern of layers, to price its placements; or ask for --sensitivity")
    file, settings, program = analysed(args, evaluation=False)
    place = settings.place()
    if args.sensitivity:
        return _sensitivity(args, place, program)
    with Step(f"pricing the placements of {args.layer}", args.quiet):
        found = list(alternatives(place, program, args.layer))
    if args.json:
        rows = [asdict(each) for each in found]
        head = {"schema": 1, "model": file.name, "world": place.world, "cluster": place.cluster.name}
        print(json.dumps({**head, "layers": matching_layers(program, args.layer), "placements": rows}, indent=1))
    else:
        print(_head(place, program, args.layer))
        print(alternatives_text(found))
    return 0


def _sensitivity(args: argparse.Namespace, place: Place, program: Program) -> int:
    """Print where the choice of the plan flips."""
    chosen = choice_text(place.run(program).plan)
    with Step(f"planning {program.name} with more and less of everything", args.quiet):
        found = list(breakpoints(place, program))
    head = {"schema": 1, "model": program.name, "world": place.world, "cluster": place.cluster.name, "choice": chosen}
    if args.json:
        print(json.dumps({**head, "breakpoints": [asdict(each) for each in found]}, indent=1))
        return 0
    print(wrap(f"{program.name} on {units.numbered(place.world, 'rank')} of {place.cluster.name}: {chosen}"))
    for each in quantities(place, program)[:4]:
        flips = (f"{at.text}: {_after(at)}" for at in found if at.quantity == each.name)
        print(wrap(f"{each.name}, now {each.text(each.now)}; {'; '.join(flips)}", "  "))
    return 0


def _after(at: Breakpoint) -> str:
    return at.choice or "nothing fits" if at.flips else "the same"


def _head(place: Place, program: Program, pattern: str) -> str:
    layers = matching_layers(program, pattern)
    named = layers[0] if len(layers) == 1 else f"{pattern} ({len(layers)} layers, {layers[0]} to {layers[-1]})"
    ranks = units.numbered(place.world, "rank")
    return wrap(
        f"{named} of {program.name} on {ranks} of {place.cluster.name}: each placement, with the rest of the plan "
        f"chosen again; simulated; * is the plan that is chosen"
    )


def alternatives_text(found: Sequence[Alternative]) -> str:
    """A table of the placements that are possible, fastest first, and why others are not."""
    possible = sorted((each for each in found if not each.why), key=lambda each: -each.samples_per_second)
    rows = [
        [
            f"{'*' if each.chosen else ' '} {each.placement}",
            each.plan,
            units.seconds(each.step_seconds),
            f"{each.samples_per_second:,.0f}",
            units.nbytes(each.sent_bytes) if each.sent_bytes else "",
            each.limit,
        ]
        for each in possible
    ]
    headers = ["  placement", "plan", "step", "samples/s", "sends", "limit"]
    text = table(headers, rows, ("left", "left", "right", "right", "right", "left"), elastic=1)
    reasons: dict[str, list[str]] = {}
    for each in found:
        reasons.setdefault(each.why, []).append(each.placement)
    return "\n".join([text, *(wrap(f"{'; '.join(names)}: {why}", "  ") for why, names in reasons.items() if why)])
