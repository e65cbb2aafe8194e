"""Check a plan, which a person may have written or edited: everything that is wrong with it is told at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, astuple
from itertools import pairwise
from typing import Any

from splitc.ir.features import features
from splitc.ir.names import is_role, near_name
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.roles import ROLES
from splitc.runtime.transport.formats import EXACT, FORMATS

_MOST_EXAMPLES = 2**40


def plan_problems(data: dict[str, Any]) -> list[str]:
    """A line for everything that is wrong with the data of a plan.json, by the names that it has for things.

    What reads a value that is of no use by itself is not checked.
    """
    plan, problems = Plan.from_dict(data)
    bad = {problem.path[0] for problem in problems if problem.path[0] != "placements" or not problem.path[1:]}
    reads = {**_SECTIONS, **{feature.problems: feature.reads for feature in features()}}
    sections = [section for section, needs in reads.items() if bad.isdisjoint(needs.split())]
    return [*map(str, problems), *(line for section in sections for line in section(plan))]


def decision_problems(plan: Plan) -> list[str]:
    """A line for everything that is wrong with what a plan decides."""
    return plan_problems(json.loads(json.dumps(plan.decision)))


def _roles(plan: Plan) -> Iterator[str]:
    world, roles, predicted = plan.world, plan.roles, plan.prediction.phases
    for role, ranks in roles.items():
        if not is_role(role, ROLES) or any(role.startswith(f"{other}_") for other in roles):
            yield f"roles: {role!r} cannot name a file and a variable: take small letters, and no name that is in use"
        if not ranks:
            yield f"roles: {role} must be a list of ranks"
        for rank in ranks:
            if not 0 <= rank < world:
                yield f"roles: {role} has rank {rank}, but the world has ranks 0 to {world - 1}"
        if len(set(ranks)) < len(ranks):
            yield f"roles: {role} has a rank twice"
        elif sorted(ranks) != [*ranks]:
            yield f"roles: {role} is {[*ranks]}; ranks must stand in their order"
    if any(min(astuple(phases)) < 0 for phases in predicted):
        yield "predicted: all numbers must be at least 0"
    if predicted and [phases.rank for phases in predicted] != list(range(world)):
        yield f"predicted: it must be for each rank of a world of {world}, in their order"


def _examples(plan: Plan) -> Iterator[str]:
    roles, examples = plan.roles, plan.batch_offsets
    if examples and examples.keys() != roles.keys():
        yield f"examples: it is for {', '.join(examples)}, and the roles are {', '.join(roles)}"
    for role, ranks in roles.items() if examples else ():
        bounds = [*examples.get(role, ())]
        if len(bounds) != len(ranks) + 1 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            yield f"examples: {role} is {bounds}; by roles it must be {len(ranks) + 1} bounds that grow from 0"
        elif bounds[-1] > _MOST_EXAMPLES:
            yield f"examples: {role} has {bounds[-1]} examples in a step; take at most {_MOST_EXAMPLES}"
    totals = {role: bounds[-1] for role, bounds in examples.items() if bounds}
    if len(set(map(str, totals.values()))) > 1:
        yield f"examples: the roles differ in the global batch, {totals}"


def _groups(plan: Plan) -> Iterator[str]:
    roles = plan.roles
    for role, group in plan.groups.items():
        if role not in roles:
            yield f"groups: there is no role {role!r}; {near_name(role, roles)}there are {', '.join(roles)}"
            continue
        if (ranks := len(roles[role])) % group.size:
            yield f"groups: {role} has groups of {group.size}, which do not divide its {ranks} ranks"
        if group.size != 1 and role == next(iter(roles)):
            yield f"groups: {role} reads the data, which no group does; let a role before it read"
        if role != (last := [*roles][-1]) and group.scheme != "BK":
            yield (
                f"groups: {role} has scheme {group.scheme!r}, but only {last}, with the loss, has several "
                f"microbatches: BK"
            )


def _microbatches(plan: Plan) -> Iterator[str]:
    number, reader, why = plan.microbatches, plan.reader, f"microbatches is {plan.microbatches}"
    if number <= 1:
        return
    smallest = min((b - a for a, b in pairwise(plan.batch_offsets.get(reader, ()))), default=number)
    if number > smallest:
        yield f"{why}, but a rank of {reader} reads {smallest} examples: take at most {smallest}"
    for role, group in plan.groups.items():
        if group.turns > 1:
            yield f"{why}, but groups: {role} has microbatches of its own, by scheme {group.scheme!r}: take BK"
        if group.updates == "every":
            yield f"{why}, but groups: {role} updates in every microbatch: take 'once'"
    if plan.synchronised:
        yield f"{why}, but synchronised BatchNorm normalises over the whole global batch at once: take 1"


def _accumulate(plan: Plan) -> Iterator[str]:
    for role, group in plan.groups.items():
        if plan.accumulate > 1 and group.updates == "every":
            yield f"accumulate is {plan.accumulate}, but groups: {role} updates in every microbatch: take 'once'"


def _wire(plan: Plan) -> Iterator[str]:
    for kind, name in asdict(plan.wire).items():
        if name not in (EXACT, *FORMATS):
            yield f"wire: {kind} is {name!r}; there are {EXACT}, {', '.join(FORMATS)}"
    if plan.wire.averages != EXACT and plan.joins_losses and plan.rounds and plan.rounds.through == "server":
        yield f"wire: averages are {plan.wire.averages!r}, but rounds: a server sums numbers as they are: take 'peers'"
    if plan.wire.gradients != EXACT and plan.all_reduce != "backend":
        yield (
            f"wire: gradients are {plan.wire.gradients!r}, but all_reduce {plan.all_reduce!r} would round in every "
            f"round: take 'backend'"
        )


def _sum_shares(plan: Plan) -> Iterator[str]:
    if plan.sum_shares and len(plan.sum_shares) != plan.world:
        yield f"sum_shares: it is {[*plan.sum_shares]}; it must have a number for each rank of a world of {plan.world}"
    if plan.sum_shares and plan.all_reduce != "backend":
        yield f"sum_shares: all_reduce {plan.all_reduce!r} sums all numbers on every rank: take 'backend'"


def _placements(plan: Plan) -> Iterator[str]:
    for layer, place in plan.placements.items():
        if place.role not in plan.roles:
            what = f"role {place.role!r}; {near_name(place.role, plan.roles)}" if place.role else "no role; "
            yield f"placements: {layer} has {what}there are {', '.join(plan.roles)}"
        if place.arrives is not None and place.role not in plan.groups:
            yield f"placements: {layer} has arrives, but its role {place.role!r} has no groups"
        if place.state is not None:
            yield from _state(plan, layer, place)
        if place.holding == "sharded":
            yield from _sharded(plan, layer, place)


def _state(plan: Plan, layer: str, place: LayerPlacement) -> Iterator[str]:
    """A layer that says how the ranks of its group hold its result is in groups, and can make it so."""
    if place.role not in plan.groups:
        yield f"placements: {layer} has state {place.state!r}, but its role {place.role!r} has no groups"
    if place.state == "features" and place.holding != "sharded":
        yield f"placements: {layer} has state 'features', but it is {place.holding}; it must be sharded"
    if place.state == "batch" and place.sync not in ("all_reduce", "none"):
        yield f"placements: {layer} has state 'batch' with sync {place.sync!r}; take all_reduce"


def _sharded(plan: Plan, layer: str, place: LayerPlacement) -> Iterator[str]:
    """A sharded layer is divided over the groups of its role, of which `group` says the size."""
    grouping = plan.groups.get(place.role)
    if grouping is None:
        yield f"placements: {layer} is sharded, but groups has nothing for its role {place.role!r}: give it a size"
    elif place.group not in (None, grouping.size):
        yield f"placements: {layer} has group {place.group}, but the groups of its role have size {grouping.size}"


_SECTIONS = {
    _roles: "world roles predicted",
    _examples: "roles examples",
    _groups: "roles groups",
    _microbatches: "roles examples groups synchronised microbatches schedule all_reduce",
    _accumulate: "groups accumulate",
    _wire: "wire all_reduce rounds",
    _sum_shares: "sum_shares world all_reduce",
    _placements: "roles groups placements",
}
"""What is checked -> the keys that it reads."""
