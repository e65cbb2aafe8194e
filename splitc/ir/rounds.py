"""Say how a plan trains in rounds, in words for reports and generated files."""

from __future__ import annotations

from collections.abc import Iterator

from splitc.ir.actions import Action
from splitc.ir.plan import Plan
from splitc.ir.program import Stage
from splitc.runtime.spec import Rounds


def rounds_text(plan: Plan) -> str:
    """`rounds of 8 updates by each rank alone, then averaged`; nothing where all ranks train together."""
    if plan.rounds is None:
        return ""
    updates, unit = plan.rounds.steps, plan.rounds.unit
    number = f"{updates} update{'s' * (updates > 1)}"
    if plan.deals:
        return f"rounds of {number} by each rank on its own subnet, then dealt again"
    text = f"rounds of {number} by each {'rank alone' if unit == 1 else f'unit of {unit} ranks'}, then averaged"
    if plan.rounds.in_turns:
        delay = f"{plan.rounds.delay} update{'s' * (plan.rounds.delay != 1)}"
        text += f", {plan.rounds.fragments} fragments in turns, each on its way for {delay}"
    return f"{text}, by an outer SGD of lr {plan.rounds.outer_lr:g}" if plan.rounds.has_outer else text


def exchanges(rounds: Rounds | None, stage: Stage) -> Iterator[Action]:
    """Yield what a role keeps and averages once a round: at its begin and end, or when fragments have their turns."""
    if rounds is None:
        return
    if stage.averaged and rounds.has_outer:
        yield Action("keep", role=stage.role)
    for bucket, fragment in enumerate(stage.fragments):
        yield Action("average", role=stage.role, bucket=bucket, update=rounds.departure(fragment))
    for bucket, fragment in enumerate(stage.fragments if rounds.delay else ()):
        yield Action("arrive", role=stage.role, bucket=bucket, update=rounds.arrival(fragment))
