"""Propose the best layer separation (Stanza 3-4): every division of the world, and the integer program in each.

The divisions are tried in the order of a bound that needs no solver, and left out once that bound is below the best
plan found; the first plans are the cuts in graph order, before any integer program.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from splitc.ir.strategies import LayerSeparation
from splitc.passes.planner.cuts import CutRules, cut_rules, uncut
from splitc.passes.planner.division import HYBRID, SEPARATION, Division, divide
from splitc.passes.planner.group_roles import asks_for_groups, group_size, in_groups, may_group
from splitc.passes.planner.pin_checks import contradictions
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible, shortage
from splitc.passes.planner.propose_stages import impossible_stages, propose_stages
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.separation_ilp import best_suffix, least_memory, solve

_UNLIMITED = 2.0**60  # bytes


def layer_separation(request: Request, options: LayerSeparation, by_name: bool = False) -> PricedPlan:
    """The fastest separation, or why there is none.  by_name: pins may ask for groups."""
    sizes, whole = options.sizes, request
    why = contradictions(request, SEPARATION)
    if any(map(asks_for_groups, request.pins.values())):
        why += [] if by_name else [f"pins ask for groups, which {SEPARATION} has where it is asked for by name"]
        whole = replace(request, memory=_UNLIMITED)  # divided layers need less; `memory_check` has the exact bytes
    if why := why or (impossible_stages(request, sizes) if sizes else _impossible(request, options)):
        return infeasible(SEPARATION, why)
    if sizes:
        return in_groups(whole, propose_stages(whole, sizes))
    return in_groups(whole, _with_copies(whole, lambda rules: _divided(whole, options, rules)))


def _divided(request: Request, options: LayerSeparation, rules: CutRules) -> PricedPlan:
    divisions = [
        divide(request, rules, n_c, request.world - n_c)
        for n_c in range(1, request.world)
        if options.n_c in (None, n_c) and options.n_f in (None, request.world - n_c)
        if may_group(request, request.world - n_c)
    ]
    if not divisions:
        asked = f"pins ask for groups of {group_size(request, request.world)} ranks"
        return infeasible(SEPARATION, [f"{asked}, which those of {request.role_names(2)[1]} cannot form"])
    busy = [d for d in divisions if all(smallest(bounds) for bounds in (d.conv_bounds, d.fc_bounds))]
    if not busy:
        return idle(SEPARATION, divisions[0].batch, request.world)
    return _search(request, rules, sorted(busy, key=lambda d: -d.bound))


def _with_copies(request: Request, search: Callable[[CutRules], PricedPlan]) -> PricedPlan:
    """The result of a search; where tied parameters leave none, that of a cut between the layers that share them.

    Each role then has a copy, and gradients are summed over all ranks that have one.
    """
    rules = cut_rules(request.program)
    whole = search(rules)
    apart = cut_rules(request.program, copies=True)
    if whole.feasible or not whole.proved or apart.together == rules.together:
        return whole
    copied = search(apart)
    if copied.plan is None or not copied.feasible:
        return whole
    role_of = {layer: place.role for layer, place in copied.plan.placements.items()}
    seconds = copied.seconds + request.tied_seconds(role_of)
    return replace(copied, seconds=seconds, bound=copied.global_batch / seconds, proved=False)


def hybrid_single(request: Request) -> PricedPlan:
    """The fc layers on rank 0, which is also one of the ranks that run the others, or why there are none."""
    if why := contradictions(request, HYBRID) or _impossible(request, LayerSeparation()):
        return infeasible(HYBRID, why)
    if not smallest(request.bounds(request.world)):
        return idle(HYBRID, request.bounds(request.world)[-1], request.world)

    def search(rules: CutRules) -> PricedPlan:
        return _search(request, rules, [divide(request, rules, request.world, 1, shared=True)])

    return replace(_with_copies(request, search), strategy=HYBRID)


def _impossible(request: Request, options: LayerSeparation) -> list[str]:
    """Why no numbers can meet the request."""
    world, n_c, n_f = request.world, options.n_c, options.n_f
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    roles = " and ".join(request.role_names(2))
    why = []
    if world < 2:
        why.append(f"a world of {world} cannot be divided into {roles} ranks; it needs 2 ranks")
    elif n_c is not None and n_f is not None and n_c + n_f != world:
        why.append(f"n_c = {n_c} and n_f = {n_f} are {n_c + n_f} ranks, but the world has {world}")
    elif max(n_c or 1, n_f or 1) >= world:
        name, value = ("n_c", n_c) if (n_c or 1) >= world else ("n_f", n_f)
        why.append(f"{name} = {value} leaves no rank of {world} for the other role")
    if not owners:
        why.append("the model has no parameters, so no layers to separate")
    elif len(owners) == 1:
        why.append(f"only one layer, {owners[0]}, has parameters; both roles need at least one")
    return why


def _search(request: Request, rules: CutRules, divisions: list[Division]) -> PricedPlan:
    """The best assignment of all divisions; `divisions` have the most promising first."""
    deadline = time.monotonic() + request.time_limit
    best: tuple[float, Division, frozenset[str]] | None = None
    for division in divisions:
        if best is not None and division.bound <= best[0]:
            break
        fc = best_suffix(division.problem)
        if fc is not None and (best is None or division.rate(fc) > best[0]):
            best = division.rate(fc), division, fc
    unknown, searched = 0.0, False  # samples per second of what is left open
    for division in divisions:
        if best is not None and division.bound <= best[0]:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            unknown = max(unknown, division.bound)
            continue
        found = solve(division.problem, left)
        searched = True
        if found.status in ("feasible", "unknown"):
            unknown = max(unknown, division.batch / found.bound if found.bound else math.inf)
        if found.fc is not None and (best is None or division.rate(found.fc) > best[0]):
            best = division.rate(found.fc), division, found.fc
    if best is not None:
        rate, division, fc = best
        return division.priced(fc, bound=max(rate, unknown), proved=searched or unknown <= rate)
    if unknown:
        return _too_slow(request, unknown)
    return _nearest(request, rules, divisions)


def _nearest(request: Request, rules: CutRules, divisions: list[Division]) -> PricedPlan:
    """The division and the cut that need the least memory, with the roles that lack it."""
    deadline = time.monotonic() + request.time_limit
    nearest: tuple[float, Division, frozenset[str]] | None = None
    for division in divisions:
        found = least_memory(division.problem, max(deadline - time.monotonic(), 1.0))
        if found.fc is not None:
            need = max(division.problem.memory_of(found.fc))
            if nearest is None or need < nearest[0]:
                nearest = need, division, found.fc
        if time.monotonic() > deadline:
            break
    if nearest is None and found.status != "infeasible":
        return _too_slow(request, 0.0)
    if nearest is None:
        return infeasible(SEPARATION, [uncut(rules, request.pins, "leaves parameters on both sides")])
    _, division, fc = nearest
    layers, (conv_need, fc_need) = division.problem.layers, division.problem.memory_of(fc)
    on_conv = {n.name: n.conv_memory for n in layers if n.name not in fc}
    on_fc = {n.name: n.fc_memory for n in layers if n.name in fc}
    roles = division.names[1:]
    if division.problem.shared:
        roles, on_fc = division.names, {**on_conv, **on_fc}
    short = shortage(division.names[:1], division.conv_ranks, conv_need, division.problem.memory, on_conv)
    short += shortage(roles, division.fc_ranks, fc_need, division.problem.memory, on_fc)
    why = f"even in the cut that needs least {', and '.join(short)}"
    return division.priced(fc, bound=0.0, infeasible_because=why)


def _too_slow(request: Request, bound: float) -> PricedPlan:
    why = f"none was found in {request.time_limit:g} s; raise time_limit"
    return PricedPlan(SEPARATION, bound=bound, proved=False, infeasible_because=why)
