"""Make the plan of an assignment, and name the roles."""

from __future__ import annotations

from collections.abc import Mapping

from splitc.ir.placements import Grouping, LayerPlacement
from splitc.ir.plan import Plan
from splitc.passes.planner.divisions import Division
from splitc.passes.planner.problem import Option
from splitc.passes.planner.request import Request


def build_plan(
    request: Request, strategy: str, division: Division, chosen: Mapping[str, Option], exact: bool = True
) -> Plan:
    """The plan of `division` in which every layer runs by its option.

    A second role on the ranks of the first is left out where no layer runs in it.
    """
    count = 1 if {option.role for option in chosen.values()} == {0} else len(division.roles)
    names = request.role_names(count)
    roles, offsets, groups = {}, {}, {}
    for name, role in zip(names, division.roles, strict=False):
        roles[name], offsets[name] = role.ranks, role.bounds
        if role.group > 1:
            groups[name] = Grouping(role.group, role.scheme, role.updates)
    placements = {}
    for layer, option in chosen.items():
        role, pin = division.roles[option.role], request.pins.get(layer)
        size = role.group if option.holding == "sharded" else None
        arrives = pin.arrives if pin is not None and role.group > 1 else None
        how = option.holding, option.sync, size, option.split, option.state, arrives
        placements[layer] = LayerPlacement(names[option.role], *how)
    decided = strategy, request.world, roles, placements, offsets, *division.order, groups
    return Plan(*decided, all_reduce=request.all_reduce, exact=exact)
