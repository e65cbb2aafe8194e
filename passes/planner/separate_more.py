"""Layer separation into more than two roles (Stanza 10, "multiple decompositions"): one group of ranks for each.

    T = sum over roles   compute of the busiest rank                                             (1)
      + sum over values  there, and the gradient back, between each two roles that it joins      (2)
      + max over roles   ring(gradients)                                                         (3)
      + sum over parameters that several roles use   ring(gradient, world)                       (4)

The layers are cut in their own order: role r runs those between its boundary and the next.  All boundaries are tried
where they are few; else those at which the fewest bytes cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from splitc.cost_models.network.alpha_beta import many_to_one, one_to_many
from splitc.ir.plan import LayerPlacement, Placement, serve
from splitc.ir.strategies import LayerSeparation
from splitc.passes.planner.cuts import Crossing, CutRules, cut_rules, uncut
from splitc.passes.planner.pins import contradictions
from splitc.passes.planner.request import Offer, Request, largest, shortage, smallest

NAME = "layer_separation"
_TRIED = 20_000  # divisions of the layers that are priced


@dataclass(frozen=True)
class _Roles:
    """The roles of a separation, with the numbers that do not depend on the cut."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    bounds: tuple[tuple[int, ...], ...]


def separate_more(request: Request, options: LayerSeparation) -> Offer:
    """The fastest cut of the layers for the roles asked for, or why there is none."""
    sizes = options.sizes
    if why := contradictions(request.pins, NAME) or _impossible(request, sizes):
        return Offer(NAME, feasible=False, why="; ".join(why))
    roles = _roles(request, sizes)
    if not all(smallest(bounds) for bounds in roles.bounds):
        idle = f"{roles.bounds[0][-1]} examples leave some of {request.world} ranks without any"
        return Offer(NAME, feasible=False, why=idle)
    for copies in (False, True):
        offer = _search(request, roles, cut_rules(request.program, copies))
        if offer.feasible:
            return offer
    return offer


def _search(request: Request, roles: _Roles, rules: CutRules) -> Offer:
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
        return Offer(NAME, feasible=False, why="; ".join(why))
    return _offer(request, roles, *best)


def _impossible(request: Request, sizes: Sequence[int]) -> list[str]:
    why = []
    if sum(sizes) != request.world:
        why.append(f"roles of {' + '.join(map(str, sizes))} ranks are {sum(sizes)}, but the world has {request.world}")
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    if len(owners) < len(sizes):
        why.append(f"{len(owners)} layers have parameters, which is too few for {len(sizes)} roles")
    return why


def _roles(request: Request, sizes: Sequence[int]) -> _Roles:
    names = tuple("conv" if k == 0 else "fc" if k == 1 else f"fc{k}" for k in range(len(sizes)))
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    ranks = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    bounds = [request.bounds(sizes[0])]
    for size in sizes[1:]:
        bounds.append(serve(bounds[-1], size))
    return _Roles(names, ranks, tuple(bounds))


def _cuts(request: Request, rules: CutRules, layers: Sequence[str], roles: int) -> Iterator[tuple[int, ...]]:
    """Boundaries: the index of the first layer of every role but the first, so that every role has parameters."""
    position = {name: k for k, name in enumerate(layers)}
    owners = [k for k, name in enumerate(layers) if any(h.parameter for h in request.held[name])]
    fit = [k for k in range(1, len(layers)) if _whole(rules, position, k)]
    while math.comb(len(fit), roles - 1) > _TRIED:
        fit.remove(max(fit, key=lambda k: _crossing_nbytes(rules, position, k)))
    for cut in combinations(fit, roles - 1):
        edges = (0, *cut, len(layers))
        if all(any(a <= k < b for k in owners) for a, b in pairwise(edges)):
            yield cut


def _whole(rules: CutRules, position: dict[str, int], boundary: int) -> bool:
    """Whether the layers can be parted before `boundary`."""

    def after(name: str) -> bool:
        return position[name] >= boundary

    return (
        all(after(j) or not after(i) for i, j in rules.order)
        and all(after(i) == after(j) for i, j in rules.together)
        and not any(after(name) for name in rules.conv_only)
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
    asked = pin.placement if pin is not None else Placement()
    alone = len(roles.ranks[role]) == 1 or not request.gradient_of(layer)
    return asked.role in (None, roles.names[role]) and (asked.sync != "none" or alone)


def _seconds(request: Request, rules: CutRules, roles: _Roles, role_of: dict[str, int]) -> float:
    """Equations (1) to (4)."""
    device = request.cluster.device_for(request.world)
    compute = sum(request.seconds(name, largest(roles.bounds[role]), device) for name, role in role_of.items())
    gradients = [0.0] * len(roles.names)
    for name, role in role_of.items():
        gradients[role] += request.gradient(name)
    sync = max(
        request.all_reduce_seconds(nbytes, ranks) if nbytes else 0.0
        for nbytes, ranks in zip(gradients, roles.ranks, strict=True)
    )
    users: dict[str, set[int]] = {}
    for layer in request.program.layers:
        for name in layer.tensors:
            users.setdefault(name, set()).add(role_of[layer.name])
    copied = [request.program.tensors[name] for name, found in users.items() if len(found) > 1]
    tied = sum(request.all_reduce_seconds(h.nbytes, range(request.world)) for h in copied if h.trainable)
    return compute + sum(_exchange(request, roles, role_of, value) for value in rules.crossings) + sync + tied


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
        batch, summed = largest(roles.bounds[role]), len(roles.ranks[role]) > 1
        needed = {layer: request.layer_memory(layer, batch, summed) for layer, r in role_of.items() if r == role}
        why += shortage((name,), roles.ranks[role], sum(needed.values()), request.memory_of(request.world), needed)
    return why


def _offer(request: Request, roles: _Roles, seconds: float, role_of: dict[str, int]) -> Offer:
    batch = roles.bounds[0][-1]
    placements = {}
    for name, role in role_of.items():
        summed = request.gradient_of(name) and len(roles.ranks[role]) > 1
        placements[name] = LayerPlacement(roles.names[role], "replicated", "all_reduce" if summed else "none")
    return Offer(
        NAME,
        feasible=True,
        roles=dict(zip(roles.names, roles.ranks, strict=True)),
        examples=dict(zip(roles.names, roles.bounds, strict=True)),
        role_of={name: roles.names[role] for name, role in role_of.items()},
        step_seconds=seconds,
        most=batch / seconds if seconds else 0.0,
        placements=placements,
    )
