"""Take a plan that was made before, from a plan.json, instead of choosing one.  This pass decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import every_layer_placed, has_costs
from splitc.errors import PlacementError
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.program import PlacedProgram, Program


@dataclass(frozen=True)
class UsePlan(Pass[Program, PlacedProgram]):
    """Fill `program.plan`.

    model: fingerprint of the program.  Raises PlacementError when the plan was made for another one.
    """

    name: ClassVar[str] = "use-plan"
    requires: ClassVar[tuple[Check, ...]] = (has_costs,)
    ensures: ClassVar[tuple[Check, ...]] = (every_layer_placed,)

    plan: Plan
    model: str

    def run(self, program: Program) -> PlacedProgram:
        plan = self.plan
        placed, there = set(plan.placements), {layer.name for layer in program.layers}
        if (plan.model and plan.model != self.model) or placed != there:
            missing, extra = sorted(there - placed), sorted(placed - there)
            differ = f"; it does not place {', '.join(missing)}" if missing else ""
            differ += f"; it places {', '.join(extra)}, which the model does not have" if extra else ""
            raise PlacementError(
                f"the plan was made for another model than {program.name} or another batch{differ}; compile without it"
            )
        return program.placed(replace(plan, model=self.model))
