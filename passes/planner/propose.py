"""Propose the best plan of a strategy: its divisions searched by the integer program, the best few simulated.

A strategy is a space: what it allows of options, moves and divisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from splitc.ir.plan import Plan
from splitc.passes.planner.build_plan import build_plan
from splitc.passes.planner.cuts import CutRules, cut_rules, uncut
from splitc.passes.planner.divisions import Division, busiest
from splitc.passes.planner.options import Space
from splitc.passes.planner.price_plan import problems_of
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible, shortage
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.search import Found, Search, search
from splitc.passes.planner.strategy import Strategy
from splitc.passes.planner.unequal import search_unequal

SIMULATED = 4
"""Plans of a strategy that are simulated, and twice as many of the whole space."""

SHARE = 1 / 8
"""Part of the time left that the search of one of the papers' strategies may take."""


def propose(request: Request, asked: Strategy, by_name: bool = False) -> list[PricedPlan]:
    """The best few plans of a strategy by the program's price, or why there is none.

    by_name: the user asked for it; groups are for memory then, so they divide what is larger than what it gathers.
    """
    name, exact = asked.name, asked.is_exact
    if why := asked.impossible(request):
        return [infeasible(name, why, exact)]
    unit = asked.in_unit(request)
    divided = list(dict.fromkeys(replace(each, order=asked.order(each.order)) for each in asked.divisions(unit)))
    busy = [each for each in divided if all(smallest(role.bounds) for role in each.roles)]
    if not busy:
        return [idle(name, divided[0].global_batch, request.world, exact)]
    searched = search_unequal if unit is request else search
    part = 1.0 if asked.spans or by_name else SHARE
    found, rules = _with_copies(request, asked.space(request, by_name), busy, partial(searched, part=part))
    if not found.found:
        return [_nothing(request, rules, asked, found)]
    most, usual = 2 * SIMULATED if asked.spans else SIMULATED, set(busy)
    few = [each for each in found.found if each.division in usual][:most]
    few += [each for each in found.found if each.division not in usual][: most // 2]
    return [_priced(request, asked, each, found) for each in few]


def _with_copies(
    request: Request, space: Space, divided: list[Division], search: Callable[..., Search]
) -> tuple[Search, CutRules]:
    """The result of a search; where tied parameters leave none, that of cuts between the layers that share them.

    Each role then has a copy, and gradients are summed over all ranks that have one.
    """
    rules = cut_rules(request.program)
    whole = search(request, rules, divided, space)
    apart = cut_rules(request.program, copies=True)
    if whole.found or not any(len(each.roles) > 1 for each in divided) or apart.together == rules.together:
        return whole, rules
    copied = search(request, apart, divided, space)
    return (copied, apart) if copied.found else (whole, rules)


def _priced(request: Request, asked: Strategy, found: Found, whole: Search) -> PricedPlan:
    plan = replace(_plan(request, asked, found), synchronised=bool(asked.sync_batchnorm))
    if problems := problems_of(request, plan):
        return PricedPlan(asked.name, plan, infeasible_because="; ".join(problems), exact=asked.is_exact)
    seconds, exact = found.seconds, asked.is_exact
    return PricedPlan(asked.name, plan, seconds, seconds, whole.bound, whole.proved, exact=exact, found=found)


def _plan(request: Request, asked: Strategy, found: Found) -> Plan:
    plan = build_plan(request, asked.name, found.division, found.chosen, asked.is_exact)
    return asked.in_world(request, plan, found.division)


# -- no plan -----------------------------------------------------------------------------------------------------------


def _nothing(request: Request, rules: CutRules, asked: Strategy, found: Search) -> PricedPlan:
    """Why no assignment meets the request."""
    name, exact = asked.name, asked.is_exact
    if request.pins and (pinned := asked.unfollowed(request)):
        return infeasible(name, pinned, exact)
    if found.fullest is None:
        if why := asked.indivisible(request):
            return infeasible(name, why, exact)
        if found.bound and not found.proved and time.monotonic() >= request.deadline:
            instead = "name another strategy, or its options, which leaves less to search"
            late = f"none was found in {request.time_limit:g} s; {instead}"
            return PricedPlan(name, bound=found.bound, proved=False, infeasible_because=late, exact=exact)
        return infeasible(name, [uncut(rules, request.pins, asked.cut)], exact)
    fullest = found.fullest
    plan = _plan(request, asked, fullest)
    short = _short(request, plan, fullest)
    searched = len(fullest.division.roles) > 1
    text = f"even in the cut that needs least {', and '.join(short)}" if searched else "; ".join(short)
    return PricedPlan(name, plan, program_seconds=fullest.seconds, infeasible_because=text, exact=exact)


def _short(request: Request, plan: Plan, found: Found) -> list[str]:
    """A line for each class of ranks that has too little memory."""
    lines = []
    for where, need in found.problem.memory_of(found.chosen).items():
        roles = [k for k, each in enumerate(found.problem.ranks) if each == where]
        scale = max(each.scale for each in busiest(request, found.division.roles[roles[-1]], found.division.busy))
        layers = {name: option.memory / scale for name, option in found.chosen.items() if option.role in roles}
        names = [name for k, name in enumerate(plan.roles) if k in roles]
        have, ranks = found.problem.memory / scale, plan.roles[names[-1]]
        if request.cluster.unlike and not request.memory:  # those that have no more
            memory = {rank: request.device_of(rank, found.division.busy).memory for rank in ranks}
            ranks = tuple(rank for rank in ranks if memory[rank] <= have * (1 + 1e-9))
        lines += shortage(names, ranks, need / scale, have, layers)
    return lines
