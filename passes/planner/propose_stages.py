"""Propose a layer separation into stages of given sizes (Stanza 10, "multiple decompositions").

    T = sum over roles   compute of the busiest rank                                             (1)
      + sum over values  there, and the gradient back, between each two roles that it joins      (2)
      + max over roles   ring(gradients)                                                         (3)
      + sum over parameters that several roles use   ring(gradient, world)                       (4)

The layers are cut in graph order: role r runs those between its boundary and the next.  All boundaries are tried if
they are few; otherwise those which the fewest bytes cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from splitc.cost_models.network.alpha_beta import many_to_one, one_to_many
from splitc.ir.shares import serve
from splitc.passes.planner.cuts import Crossing, CutRules, cut_rules, uncut
from splitc.passes.planner.group_roles import asks_for_groups
from splitc.passes.planner.priced_plan import PricedPlan, idle, infeasible, only_plan, shortage
from splitc.passes.planner.request import Request, largest, smallest

NAME = "layer_separation"
_TRIED = 20_000  # divisions of the layers that are priced


@dataclass(frozen=True)
class _Roles:
    """The roles of a separation, with their ranks and the bounds of their examples."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[int, ...], ...]


def propose_stages(request: Request, sizes: Sequence[int]) -> PricedPlan:
    """The fastest cut of the layers for roles of these sizes, or why there is none."""
    roles = _roles(request, sizes)
    if not all(smallest(bounds) for bounds in roles.bounds):
        return idle(NAME, roles.bounds[0][-1], request.world)
    for copies in (False, True):
        priced = _search(request, roles, cut_rules(request.program, copies))
        if priced.feasible:
            return priced
    return priced


def _search(request: Request, roles: _Roles, rules: CutRules) -> PricedPlan:
    """The fastest cut that fits."""
    layers = [layer.name for layer in request.program.layers]
    best: tuple[float, dict[str, int]] | None = None
    nearest: list[str] = []
    for cut in _cuts(request, rules, layers, len(roles.names)):
        role_of = {name: sum(k >= boundary for boundary in cut) for k, name in enumerate(layers)}
        if any(not _allowed(request, roles, name, role) for name, role in role_of.items()):
            continue
        seconds = _seconds(request, rules, roles, role_of)
        if best is not None and seconds >= best[0]:
            continue
        if short := _short(request, roles, role_of):
            nearest = nearest or short
            continue
        best = seconds, role_of
    if best is None:
        why = nearest or [uncut(rules, request.pins, "in their order leaves parameters in every role")]
        return infeasible(NAME, why)
    seconds, role_of = best
    named = {name: roles.names[role] for name, role in role_of.items()}
    ranks, bounds = (dict(zip(roles.names, each, strict=True)) for each in (roles.ranks, roles.bounds))
    return only_plan(request.replicated_plan(NAME, ranks, bounds, named), seconds, [])


def impossible_stages(request: Request, sizes: Sequence[int]) -> list[str]:
    """Why the layers cannot be divided over roles of these sizes."""
    why = []
    if sum(sizes) != request.world:
        why.append(f"roles of {' + '.join(map(str, sizes))} ranks are {sum(sizes)}, but the world has {request.world}")
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    if len(owners) < len(sizes):
        why.append(f"{len(owners)} layers have parameters, which is too few for {len(sizes)} roles")
    return why


def _roles(request: Request, sizes: Sequence[int]) -> _Roles:
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    ranks = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    bounds = [request.bounds(sizes[0])]
    for size in sizes[1:]:
        bounds.append(serve(bounds[-1], size))
    return _Roles(request.role_names(len(sizes)), ranks, tuple(bounds))


def _cuts(request: Request, rules: CutRules, layers: Sequence[str], roles: int) -> Iterator[tuple[int, ...]]:
    """Boundaries: the index of the first layer of every role but the first, so that every role has parameters."""
    position = {name: k for k, name in enumerate(layers)}
    owners = [k for k, name in enumerate(layers) if any(h.parameter for h in request.held[name])]
    fit = [k for k in range(1, len(layers)) if _can_cut(rules, position, k)]
    while math.comb(len(fit), roles - 1) > _TRIED:
        fit.remove(max(fit, key=lambda k: _crossing_nbytes(rules, position, k)))
    for cut in combinations(fit, roles - 1):
        edges = (0, *cut, len(layers))
        if all(any(a <= k < b for k in owners) for a, b in pairwise(edges)):
            yield cut


def _can_cut(rules: CutRules, position: dict[str, int], boundary: int) -> bool:
    """Whether the layers can be parted before `boundary`."""

    def after(name: str) -> bool:
        return position[name] >= boundary

    return (
        all(after(j) or not after(i) for i, j in rules.order)
        and all(after(i) == after(j) for i, j in rules.together)
        and not any(after(name) for name in rules.reader_only)
    )


def _crossing_nbytes(rules: CutRules, position: dict[str, int], boundary: int) -> int:
    return sum(
        value.spec.nbytes(1)
        for value in rules.crossings
        if (value.layer is None or position[value.layer] < boundary)
        and any(position[reader] >= boundary for reader in value.readers)
    )


def _allowed(request: Request, roles: _Roles, layer: str, role: int) -> bool:
    pin = request.pins.get(layer)
    alone = len(roles.ranks[role]) == 1 or not request.gradient_of(layer)
    reads = role == 0 and asks_for_groups(pin)
    return pin is None or (pin.stage in (None, role) and (pin.sync != "none" or alone) and not reads)


def _seconds(request: Request, rules: CutRules, roles: _Roles, role_of: dict[str, int]) -> float:
    """Equations (1) to (4)."""
    compute = sum(request.seconds(name, largest(roles.bounds[role]), request.world) for name, role in role_of.items())
    gradients = [0.0] * len(roles.names)
    for name, role in role_of.items():
        gradients[role] += request.gradient(name)
    sync = max(
        request.all_reduce_seconds(nbytes, ranks) if nbytes else 0.0
        for nbytes, ranks in zip(gradients, roles.ranks, strict=True)
    )
    exchanges = sum(_exchange(request, roles, role_of, value) for value in rules.crossings)
    return compute + exchanges + sync + request.tied_seconds(role_of)


def _exchange(request: Request, roles: _Roles, role_of: dict[str, int], value: Crossing) -> float:
    """Equation (2) for one value."""
    maker = 0 if value.layer is None else role_of[value.layer]
    seconds = 0.0
    for reader in {role_of[name] for name in value.readers} - {maker}:
        here, there = roles.bounds[maker], roles.bounds[reader]
        messages = max(1, math.ceil(max(len(here), len(there)) / min(len(here), len(there))))
        nbytes = value.spec.nbytes(max(largest(here), largest(there))) / messages
        link = request.cluster.link_across(roles.ranks[maker], roles.ranks[reader])
        seconds += many_to_one(nbytes, messages, link)
        if value.gradient:
            seconds += one_to_many(nbytes, messages, link)
    return seconds


def _short(request: Request, roles: _Roles, role_of: dict[str, int]) -> list[str]:
    """A line for each role whose ranks have too little memory."""
    why = []
    for role, name in enumerate(roles.names):
        batch = request.live(largest(roles.bounds[role]), len(roles.names) - role - 1)
        summed = len(roles.ranks[role]) > 1
        needed = {layer: request.layer_memory(layer, batch, summed) for layer, r in role_of.items() if r == role}
        why += shortage((name,), roles.ranks[role], sum(needed.values()), request.memory_of(request.world), needed)
    return why
