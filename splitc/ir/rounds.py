"""Say how a plan trains in rounds, in words for reports and generated files, and what rounds must be."""

from __future__ import annotations

from collections.abc import Iterator

from splitc.ir.plan import Plan
from splitc.ir.program import Stage
from splitc.ir.schedule.actions import Action
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


def rounds_problems(rounds: Rounds) -> Iterator[str]:
    """Yield a line for each number that makes no sense."""
    if rounds.steps < 1:
        yield f"a round has {rounds.steps} updates; it must have at least 1"
    if not rounds.outer_lr > 0:
        yield f"outer_lr is {rounds.outer_lr:g}; it must be more than 0"
    if not 0 <= rounds.outer_momentum < 1:
        yield f"outer_momentum is {rounds.outer_momentum:g}; it must be at least 0 and less than 1"
    if rounds.nesterov and not rounds.outer_momentum:
        yield "nesterov is a rule for momentum, but outer_momentum is 0"
    if not 1 <= rounds.fragments <= max(rounds.steps, 1):
        yield f"{rounds.fragments} fragments cannot take turns in {rounds.steps} updates; take 1 to {rounds.steps}"
    if not 0 <= rounds.delay < max(rounds.steps, 1):
        yield f"delay is {rounds.delay}, but a fragment arrives before it leaves again, {rounds.steps} updates later"
    if rounds.through not in ("peers", "server"):
        yield f"through is {rounds.through!r}; it must be peers or server"
    if not 0 <= rounds.mixing <= 1 or (rounds.mixing and not rounds.delay):
        yield f"mixing is {rounds.mixing:g}; it must be 0 to 1, and 0 without a delay, which leaves nothing to mix"
