"""Say how a plan trains in rounds, in words for reports and generated files."""

from __future__ import annotations

from splitc.ir.plan import Plan


def rounds_text(plan: Plan) -> str:
    """`rounds of 8 updates by each rank alone, then averaged`; nothing where all ranks train together."""
    if plan.rounds is None:
        return ""
    updates, unit = plan.rounds.steps, plan.rounds.unit
    number = f"{updates} update{'s' * (updates > 1)}"
    if any(place.holding == "subnet" for place in plan.placements.values()):
        return f"rounds of {number} by each rank on its own subnet, then dealt again"
    return f"rounds of {number} by each {'rank alone' if unit == 1 else f'{unit} ranks'}, then averaged"
