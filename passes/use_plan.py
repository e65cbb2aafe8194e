"""Take a plan that was made before, from a plan.json, instead of choosing one.  This pass decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.batch_sizes import microbatch_problems
from splitc.checks.graph import every_layer_placed, has_costs
from splitc.errors import LaunchError, PlacementError, bullets
from splitc.ir.linears import as_linear
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import plan_problems
from splitc.ir.program import PlacedProgram, Program


@dataclass(frozen=True)
class UsePlan(Pass[Program, PlacedProgram]):
    """Fill `program.plan`.

    model: fingerprint of the program.  Raises LaunchError when a field of the plan is wrong or does not fit it, and
    PlacementError when the plan was made for another one.
    """

    requires: ClassVar[tuple[Check, ...]] = (has_costs,)
    ensures: ClassVar[tuple[Check, ...]] = (every_layer_placed,)

    plan: Plan
    model: str

    def run(self, program: Program) -> PlacedProgram:
        plan = self.plan
        if problems := plan_problems(json.loads(plan.to_json())):
            raise LaunchError(bullets("the plan cannot be followed:", problems))
        placed, there = set(plan.placements), {layer.name for layer in program.layers}
        if (plan.model and plan.model != self.model) or placed != there:
            missing, extra = sorted(there - placed), sorted(placed - there)
            differ = f"; it does not place {', '.join(missing)}" if missing else ""
            differ += f"; it places {', '.join(extra)}, which the model does not have" if extra else ""
            raise PlacementError(
                f"the plan was made for another model than {program.name} or another batch{differ}; compile without it"
            )
        if problems := list(dict.fromkeys([*_misfits(program, plan), *microbatch_problems(program, plan)])):
            raise LaunchError(bullets(f"the plan does not fit {program.name}:", problems))
        return program.placed(replace(plan, model=self.model))


def _misfits(program: Program, plan: Plan) -> Iterator[str]:
    """Placements that need data from a later role, or leave gradients of copies apart."""
    order, placed = list(plan.roles), plan.placements
    for value, reader in program.edges():
        if value.name in program.layer_of and reader.name in program.layer_of:
            before, after = (program.layer_of[node.name] for node in (value, reader))
            if order.index(placed[before].role) > order.index(placed[after].role):
                yield (
                    f"placements: {after}, in role {placed[after].role!r}, reads {before}, in role "
                    f"{placed[before].role!r}, but data pass through {', '.join(order)} in this order"
                )
    for name in program.placed(plan).tied if plan.rounds else ():
        yield f"rounds: {name} is used in several roles, which train copies of it; give the layers that use it one role"
    nodes = {node.name: node for node in program.graph.nodes}
    for layer in program.layers:
        place = placed[layer.name]
        if not any(program.tensors[name].trainable for name in layer.tensors):
            continue
        if place.sync in ("none", "average") and plan.trains_copies(place.role):
            yield f"placements: {layer.name} has sync {place.sync!r}, but ranks train copies of it: take 'all_reduce'"
        is_linear = any(as_linear(program, nodes[name]) for name in layer.nodes)
        if place.sync == "late_multiply" and (not is_linear or place.role in plan.groups):
            yield f"placements: {layer.name} has sync 'late_multiply', which linear layers in roles without groups have"
