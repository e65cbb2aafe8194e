"""Take a plan that was made before, from a plan.json, instead of choosing one.  This pass decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from splitc.checks.batch_sizes import step_problems
from splitc.checks.graph import every_layer_placed, has_costs
from splitc.errors import LaunchError, PlacementError, bullets
from splitc.ir.features import features
from splitc.ir.names import near_name
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems, plan_problems
from splitc.ir.program import PlacedProgram, Program
from splitc.ir.shares import serve
from splitc.passes.planner.syncs import sync_misfits


@dataclass(frozen=True)
class UsePlan(Pass[Program, PlacedProgram]):
    """Fill `program.plan`, with what the plan leaves to the model: patterns of layers, and examples.

    model: fingerprint of the program.  Raises LaunchError when a field of the plan is wrong or does not fit it, and
    PlacementError when the plan was made for another one.
    """

    requires: ClassVar[tuple[Check, ...]] = (has_costs,)
    ensures: ClassVar[tuple[Check, ...]] = (every_layer_placed,)

    plan: Plan
    model: str

    def run(self, program: Program) -> PlacedProgram:
        if problems := plan_problems(json.loads(self.plan.to_json())):
            raise LaunchError(bullets("the plan cannot be followed:", problems))
        plan, problems = for_layers(program, self.plan)
        if plan.model and plan.model != self.model:
            other = f"the plan was made for another model than {program.name} or another batch; compile without it"
            raise PlacementError(bullets(other, problems))
        if problems:
            raise PlacementError(bullets(f"the plan does not place the layers of {program.name}:", problems))
        if problems := list(dict.fromkeys([*decision_problems(plan), *_misfits(program, plan)])):
            raise LaunchError(bullets(f"the plan does not fit {program.name}:", problems))
        return program.placed(replace(plan, model=self.model))


def for_layers(program: Program, plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with a placement for every layer and examples for every role, and what matches no layer or no pattern.

    A name counts before patterns, and of these the last.  The gradients of a layer without any are not summed.
    """
    found, names = {}, [layer.name for layer in program.layers]
    for layer in program.layers:
        matching = (pattern for pattern in reversed([*plan.placements]) if fnmatchcase(layer.name, pattern))
        if (key := layer.name if layer.name in plan.placements else next(matching, None)) is not None:
            place = plan.placements[key]
            trains = any(program.tensors[name].trainable for name in layer.tensors)
            found[layer.name] = (
                place if trains or place.sync not in ("all_reduce", "average") else replace(place, sync="none")
            )
    problems = [
        f"placements: {pattern!r} matches no layer; {near_name(pattern, names)}the first are {', '.join(names[:8])}"
        for pattern in plan.placements
        if pattern not in found and not any(fnmatchcase(name, pattern) for name in names)
    ]
    if missing := [name for name in names if name not in found]:
        problems.append(f"placements: nothing matches {', '.join(missing)}; place them, or '*' for all without a name")
    even = tuple(program.batch * k for k in range(len(plan.roles[plan.reader]) + 1))
    offsets = plan.batch_offsets or {role: serve(even, len(ranks)) for role, ranks in plan.roles.items()}
    return replace(plan, placements=found, batch_offsets=offsets), problems


def _misfits(program: Program, plan: Plan) -> Iterator[str]:
    """Placements that need data from a later role or leave gradients of copies apart, and small batches."""
    yield from step_problems(program, plan)
    yield from sync_misfits(program, plan)
    order, placed = list(plan.roles), plan.placements
    for value, reader in program.edges():
        if value.name in program.layer_of and reader.name in program.layer_of:
            before, after = (program.layer_of[node.name] for node in (value, reader))
            if order.index(placed[before].role) > order.index(placed[after].role):
                yield (
                    f"placements: {after}, in role {placed[after].role!r}, reads {before}, in role "
                    f"{placed[before].role!r}, but data pass through {', '.join(order)} in this order"
                )
    for feature in features():
        yield from feature.misfits(program, plan)
    for layer in program.layers:
        place = placed[layer.name]
        if not any(program.tensors[name].trainable for name in layer.tensors):
            continue
        if place.sync in ("none", "average") and plan.trains_copies(place.role):
            yield f"placements: {layer.name} has sync {place.sync!r}, but ranks train copies of it: take 'all_reduce'"
        elif (place.sync, place.holding) == ("all_reduce", "sharded") and not plan.trains_copies(place.role):
            yield f"placements: {layer.name} has sync 'all_reduce', but no two ranks have the same part: take 'none'"
