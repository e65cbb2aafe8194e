"""Propose the best plan of a strategy: its divisions searched by the integer program, the best few simulated.

Strategies are spaces: what they allow of options, moves and divisions.  `mixed` allows everything.

    data_parallel      replicated, gradients all-reduced
    late_multiply      the same, and linear layers that are late-multiplied; one at least
    layer_separation, hybrid_single      replicated in every role
    modulo_shard       replicated before the groups; in them columns, rows of what columns made, or alike; one divided
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from splitc.ir.graph import tensor_spec
from splitc.ir.plan import Plan
from splitc.ir.strategies import LateMultiply, LayerSeparation, Mixed, ModuloShard
from splitc.ir.strategy import InRounds, Strategy
from splitc.passes.planner.build_plan import build_plan
from splitc.passes.planner.cuts import CutRules, cut_rules, following, uncut
from splitc.passes.planner.divisions import Division, busiest, divisions
from splitc.passes.planner.impossible import impossible, unfollowed
from splitc.passes.planner.options import Space, role_options
from splitc.passes.planner.pins import UNPINNED, Pin
from splitc.passes.planner.price_plan import problems_of
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible, shortage
from splitc.passes.planner.problem import Option, Place
from splitc.passes.planner.request import Request, largest, smallest
from splitc.passes.planner.search import Found, Search, search
from splitc.passes.planner.unequal import search_unequal
from splitc.runtime.spec import Rounds

SIMULATED = 4
"""Plans of a strategy that are simulated, and twice as many of the whole space."""

SHARE = 1 / 8
"""Part of the time left that the search of one of the papers' strategies may take."""


def propose(request: Request, asked: Strategy, by_name: bool = False) -> list[PricedPlan]:
    """The best few plans of a strategy by the program's price, or why there is none.

    by_name: the user asked for it; groups are for memory then, so they divide what is larger than what it gathers.
    """
    name, exact = asked.name, asked.is_exact
    if why := impossible(request, asked):
        return [infeasible(name, why, exact)]
    divided = list(dict.fromkeys(_as_asked(each, asked) for each in divisions(_of_unit(request, asked), asked)))
    busy = [each for each in divided if all(smallest(role.bounds) for role in each.roles)]
    if not busy:
        return [idle(name, divided[0].global_batch, request.world, exact)]
    searched = search if isinstance(asked, InRounds) and asked.period is not None else search_unequal
    part = 1.0 if isinstance(asked, Mixed) or by_name else SHARE
    found, rules = _with_copies(request, space_of(request, asked, by_name), busy, partial(searched, part=part))
    if not found.found:
        return [_nothing(request, rules, asked, found)]
    most, usual = 2 * SIMULATED if isinstance(asked, Mixed) else SIMULATED, set(busy)
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


def _of_unit(request: Request, asked: Strategy) -> Request:
    """The request of one unit, where units of ranks train by themselves."""
    if not isinstance(asked, InRounds) or asked.period is None:
        return request
    mp = asked.mp if isinstance(asked, ModuloShard) else 1
    size = mp or max(size for size in range(2, request.world // 2 + 1) if request.world % size == 0)
    return replace(request, world=size, global_batch=size * largest(request.bounds(request.world)))


def _as_asked(division: Division, asked: Strategy) -> Division:
    """The division in the microbatches asked for, in place of those of its groups, unless these were asked for too."""
    if asked.microbatches in (None, 1):
        return division if asked.microbatches is None else replace(division, microbatches=1)
    roles = division.roles
    if not (isinstance(asked, ModuloShard) and asked.scheme):
        roles = tuple(replace(role, scheme="BK") for role in roles)
    return replace(division, roles=roles, microbatches=asked.microbatches, schedule=asked.schedule or division.schedule)


def _priced(request: Request, asked: Strategy, found: Found, whole: Search) -> PricedPlan:
    plan = build_plan(request, asked.name, found.division, found.chosen, asked.is_exact, _rounds(asked, found.division))
    plan = replace(plan, synchronised=bool(asked.sync_batchnorm))
    if problems := problems_of(request, plan):
        return PricedPlan(asked.name, plan, infeasible_because="; ".join(problems), exact=asked.is_exact)
    seconds, exact = found.seconds, asked.is_exact
    return PricedPlan(asked.name, plan, seconds, seconds, whole.bound, whole.proved, exact=exact, found=found)


def _rounds(asked: Strategy, division: Division) -> Rounds | None:
    return asked.rounds(division.roles[-1].group) if isinstance(asked, InRounds) else None


# -- spaces ------------------------------------------------------------------------------------------------------------


def space_of(request: Request, asked: Strategy, by_name: bool) -> Space:
    grouped = isinstance(asked, ModuloShard)
    large = _large(request) if by_name and grouped else frozenset()
    rules = cut_rules(request.program)
    inside = following(rules, request.linears) if grouped else set(request.held)
    late = _worth_multiplying(request, rules) if by_name and isinstance(asked, LateMultiply) else None

    def allows(division: Division, layer: str, option: Option) -> bool:
        pin = request.pins.get(layer, UNPINNED)
        if late is not None and pin.sync is None and (option.sync == "late_multiply") != (layer in late):
            return False
        if option.role and layer not in inside:
            return False
        if option.role and pin is UNPINNED and layer in large and option.holding == "replicated":
            return False
        return _in_strategy(asked, option, pin) and _follows(request, division, layer, option, pin)

    if isinstance(asked, LateMultiply):
        return Space(allows, wanted=(("sync", frozenset({"late_multiply"})),))
    if isinstance(asked, ModuloShard):
        return Space(
            allows,
            (lambda start, end: True) if any(pin.split for pin in request.pins.values()) else _gathers,
            (("holding", frozenset({"sharded"})),),
        )
    return Space(allows)


def _large(request: Request) -> frozenset[str]:
    """The linear layers with more bytes of parameters than of output, for one rank's batch.

    This is the ratio of computing to communication of SplitBrain's listing 1, in bytes, with 1 as its threshold.
    """
    batch, found = largest(request.bounds(request.world)), set()
    for layer, uses in request.linears.items():
        gathered = sum(tensor_spec(use.node).nbytes(batch) for use in uses)
        if request.gradient_of(layer) and sum(h.nbytes for h in request.held[layer] if h.parameter) > gathered:
            found.add(layer)
    return frozenset(found)


def _worth_multiplying(request: Request, rules: CutRules) -> frozenset[str]:
    """The linear layers for which late multiply takes less than an all-reduce, without overlap; all where none does."""
    (division,) = divisions(request, LateMultiply())
    known = role_options(request, rules, division, 0)
    seconds = {
        layer: {option.sync: option.computing + option.syncing for option in known[layer]}
        for layer in request.linears
        if any(option.sync == "late_multiply" for option in known[layer])
    }
    cheaper = (layer for layer, by in seconds.items() if by["late_multiply"] < by["all_reduce"])
    return frozenset(cheaper) or frozenset(seconds)


def _gathers(start: Place, end: Place) -> bool:
    """Whether SplitBrain has a move: it gathers examples and features, and has no all-to-all."""
    return (start[1], end[1]) != ("batch", "features")


def _in_strategy(asked: Strategy, option: Option, pin: Pin) -> bool:
    """Whether a strategy has an option, in what no pin asks for."""
    if isinstance(asked, Mixed):
        if pin.holding or pin.split:
            return option.state == pin.state  # which is a part of the pin: None is a state of its own
        return option.state != "replicate" or pin.state == "replicate"
    if option.sync == "late_multiply":
        return isinstance(asked, LateMultiply)
    if option.state is not None and pin.state is None and pin.group != 1:
        return False
    divides = isinstance(asked, ModuloShard) or (pin is not UNPINNED and isinstance(asked, LayerSeparation))
    return option.holding == "replicated" or divides


def _follows(request: Request, division: Division, layer: str, option: Option, pin: Pin) -> bool:
    """Whether an option has what a pin asks for."""
    group = division.roles[option.role].group
    grouped = 1 if option.state == "batch" and option.holding == "replicated" else group
    owns, trains = layer in request.divisible, request.gradient_of(layer) > 0
    summed = "all_reduce", "average"  # which is nothing where one rank trains it, in its unit
    return (
        (pin.stage in (None, option.role) or len(division.roles) == 1)
        and pin.group in (None, group, grouped)
        and (not owns or pin.holding in (None, option.holding))
        and pin.split in (None, option.split)
        and (pin.state in (None, option.state, option.makes) or option.role == 0)
        and (pin.sync in (None, option.sync) or (option.sync == "none" and (pin.sync in summed or not trains)))
    )


# -- no plan -----------------------------------------------------------------------------------------------------------


def _nothing(request: Request, rules: CutRules, asked: Strategy, found: Search) -> PricedPlan:
    """Why no assignment meets the request."""
    name, exact = asked.name, asked.is_exact
    if pinned := unfollowed(request, asked):
        return infeasible(name, pinned, exact)
    if found.fullest is None:
        if isinstance(asked, ModuloShard) and request.program.in_batch:
            return infeasible(name, [f"{request.program.in_batch} needs the whole batch, so it is not divided"], exact)
        if found.bound and not found.proved and time.monotonic() >= request.deadline:
            why = f"none was found in {request.time_limit:g} s; raise time_limit"
            return PricedPlan(name, bound=found.bound, proved=False, infeasible_because=why, exact=exact)
        several = isinstance(asked, LayerSeparation) and len(asked.sizes) > 0
        where = "in their order leaves parameters in every role" if several else "leaves parameters on both sides"
        return infeasible(name, [uncut(rules, request.pins, where)], exact)
    fullest = found.fullest
    plan = build_plan(request, name, fullest.division, fullest.chosen, exact, _rounds(asked, fullest.division))
    short = _short(request, plan, fullest)
    searched = len(fullest.division.roles) > 1
    why = f"even in the cut that needs least {', and '.join(short)}" if searched else "; ".join(short)
    return PricedPlan(name, plan, program_seconds=fullest.seconds, infeasible_because=why, exact=exact)


def _short(request: Request, plan: Plan, found: Found) -> list[str]:
    """A line for each class of ranks that has too little memory."""
    lines = []
    needed = found.problem.memory_of(found.chosen)
    for where, need in needed.items():
        roles = [k for k, each in enumerate(found.problem.ranks) if each == where]
        last = found.division.roles[roles[-1]]
        scale = max(each.scale for each in busiest(request, last, found.division.busy))
        layers = {name: option.memory / scale for name, option in found.chosen.items() if option.role in roles}
        names = [name for k, name in enumerate(plan.roles) if k in roles]
        have, ranks = found.problem.memory / scale, plan.roles[names[-1]]
        if request.cluster.unlike and not request.memory:  # those that have no more
            memory = {rank: request.device_of(rank, found.division.busy).memory for rank in ranks}
            ranks = tuple(rank for rank in ranks if memory[rank] <= have * (1 + 1e-9))
        lines += shortage(names, ranks, need / scale, have, layers)
    return lines
