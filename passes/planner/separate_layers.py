"""Search the best layer separation (Stanza 3-4): every division of the world, and the ILP in each.

The divisions are tried in the order of a bound that needs no solver, and left out once that bound is
below the best plan found; the first plans are the cuts of the layers' own order, before any ILP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from splitc.cost_models.memory.memory import cut_nbytes
from splitc.cost_models.network.alpha_beta import many_to_one, one_to_many
from splitc.ir.plan import serve
from splitc.ir.strategies import LayerSeparation
from splitc.passes.planner.cuts import Crossing, CutRules, cut_rules, uncut
from splitc.passes.planner.pins import contradictions
from splitc.passes.planner.request import Offer, Request, largest, shortage, smallest, unsummed
from splitc.passes.planner.separate_more import separate_more
from splitc.passes.planner.separation import LayerNumbers, Separation, SyncLine, ValueNumbers
from splitc.passes.planner.separation_ilp import best_suffix, least_memory, solve

NAME = "layer_separation"
HYBRID = "hybrid_single"


@dataclass(frozen=True)
class Division:
    """n_c conv ranks and n_f fc ranks, their examples, and the numbers of their integer program.

    strategy: `hybrid_single` when the one fc rank is a conv rank too (Practical Lessons 2.2).
    """

    roles: dict[str, tuple[int, ...]]
    examples: dict[str, tuple[int, ...]]
    problem: Separation
    strategy: str = NAME

    @property
    def batch(self) -> int:
        return self.examples["conv"][-1]

    @property
    def most(self) -> float:
        """Samples per second that no assignment exceeds."""
        seconds = self.problem.least_seconds()
        return self.batch / seconds if seconds else math.inf

    def rate(self, fc: frozenset[str]) -> float:
        """Samples per second."""
        return self.batch / self.problem.step(fc).total

    def offer(self, fc: frozenset[str], why: str = "", most: float = 0.0) -> Offer:
        names = [layer.name for layer in self.problem.layers]
        return Offer(
            self.strategy,
            feasible=not why,
            why=why,
            roles=self.roles,
            examples=self.examples,
            role_of={name: "fc" if name in fc else "conv" for name in names},
            step_seconds=self.problem.step(fc).total,
            most=most,
            problem=self.problem,
        )


def layer_separation(request: Request, options: LayerSeparation) -> Offer:
    """The fastest separation, or why there is none."""
    if options.sizes:
        return separate_more(request, options)
    why = contradictions(request.pins, NAME) or _impossible(request, options)
    if why:
        return Offer(NAME, feasible=False, why="; ".join(why))
    return _with_copies(request, lambda rules: _divided(request, options, rules))


def _divided(request: Request, options: LayerSeparation, rules: CutRules) -> Offer:
    divisions = [
        _division(request, rules, n_c, request.world - n_c)
        for n_c in range(1, request.world)
        if options.n_c in (None, n_c) and options.n_f in (None, request.world - n_c)
    ]
    busy = [d for d in divisions if all(smallest(bounds) for bounds in d.examples.values())]
    if not busy:
        idle = f"{divisions[0].batch} examples leave some of {request.world} ranks without any"
        return Offer(NAME, feasible=False, why=idle)
    return _search(request, rules, sorted(busy, key=lambda d: -d.most))


def _with_copies(request: Request, search: Callable[[CutRules], Offer]) -> Offer:
    """The offer of a search; where tied parameters leave none, that of a cut between the layers that share them.

    Each role then has a copy, whose gradients are summed over all ranks that have one.
    """
    rules = cut_rules(request.program)
    offer = search(rules)
    apart = cut_rules(request.program, copies=True)
    if offer.feasible or not offer.searched or apart.together == rules.together:
        return offer
    parted = search(apart)
    if not parted.feasible:
        return offer
    seconds = parted.step_seconds + sum(
        request.all_reduce_seconds(request.program.tensors[name].nbytes, range(request.world))
        for name in _in_both(request, parted.role_of)
    )
    return replace(parted, step_seconds=seconds, most=parted.global_batch / seconds, searched=False)


def _in_both(request: Request, role_of: Mapping[str, str]) -> list[str]:
    """Trainable parameters that layers of both roles use."""
    roles: dict[str, set[str]] = {}
    for layer in request.program.layers:
        for name in layer.tensors:
            roles.setdefault(name, set()).add(role_of[layer.name])
    return [name for name, users in roles.items() if len(users) > 1 and request.program.tensors[name].trainable]


def hybrid_single(request: Request) -> Offer:
    """The fc layers on rank 0, which is also one of the ranks that run the others, or why there are none."""
    why = contradictions(request.pins, HYBRID) or _impossible(request, LayerSeparation())
    if why:
        return Offer(HYBRID, feasible=False, why="; ".join(why))
    if not smallest(request.bounds(request.world)):
        idle = f"{request.bounds(request.world)[-1]} examples leave some of {request.world} ranks without any"
        return Offer(HYBRID, feasible=False, why=idle)

    def search(rules: CutRules) -> Offer:
        return _search(request, rules, [_division(request, rules, request.world, 1, shared=True)])

    return replace(_with_copies(request, search), strategy=HYBRID)


def _impossible(request: Request, options: LayerSeparation) -> list[str]:
    """Why the request cannot be met at all, whatever the numbers."""
    world, n_c, n_f = request.world, options.n_c, options.n_f
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    why = []
    if world < 2:
        why.append(f"a world of {world} cannot be divided into conv and fc ranks; it needs 2 ranks")
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


def _division(request: Request, rules: CutRules, n_c: int, n_f: int, shared: bool = False) -> Division:
    """shared: the fc rank is the first conv rank, which has its own part of every value already."""
    conv = request.bounds(n_c)
    fc = serve(conv, n_f)
    roles = {"conv": tuple(range(n_c)), "fc": (0,) if shared else tuple(range(n_c, n_c + n_f))}
    batches, link = {"conv": largest(conv), "fc": largest(fc)}, request.cluster.link_across(*roles.values())
    messages, crowded = _messages(conv, fc), max(batches.values())
    device = request.cluster.device_for(request.world)

    def numbers(layer: str) -> LayerNumbers:
        held = request.held[layer]
        copied = [n for n in request.program.layer(layer).tensors if request.program.tensors[n] not in held]
        parted = not any(layer in pair for pair in rules.together)
        copies = sum(request.layer_copy(name) for name in copied) if parted else 0.0
        return LayerNumbers(
            layer,
            conv_seconds=request.seconds(layer, batches["conv"], device),
            fc_seconds=request.seconds(layer, batches["fc"], device),
            conv_memory=request.layer_memory(layer, batches["conv"], n_c > 1),
            fc_memory=request.layer_memory(layer, batches["fc"], n_f > 1) + copies,
            gradient=request.gradient(layer),
            parameters=any(h.parameter for h in held),
            roles=_roles(request, rules, layer, n_c, n_f),
        )

    def crossing(value: Crossing) -> ValueNumbers:
        nbytes = value.spec.nbytes(crowded) / messages
        there = many_to_one(nbytes, messages - shared, link)
        back = one_to_many(nbytes, messages - shared, link) if value.gradient else 0.0
        return ValueNumbers(
            value.name,
            value.layer,
            value.readers,
            seconds=there + back,
            conv_memory=cut_nbytes(value.spec, batches["conv"]),
            fc_memory=cut_nbytes(value.spec, batches["fc"]),
        )

    return Division(
        roles,
        {"conv": conv, "fc": fc},
        Separation(
            layers=tuple(numbers(layer.name) for layer in request.program.layers),
            values=tuple(crossing(value) for value in rules.crossings),
            order=rules.order,
            together=tuple(rules.together),
            conv_sync=_sync_line(request, roles["conv"]),
            fc_sync=_sync_line(request, roles["fc"]),
            memory=request.memory_of(request.world),
            shared=shared,
        ),
        HYBRID if shared else NAME,
    )


def _roles(request: Request, rules: CutRules, layer: str, n_c: int, n_f: int) -> tuple[str, ...]:
    """Where a layer may run: by its pin, and by the inputs it reads."""
    pin = request.pins.get(layer)
    roles = {"conv": n_c, "fc": n_f}
    if layer in rules.conv_only:
        roles.pop("fc")
    if pin is not None and pin.placement.role is not None:
        roles = {role: n for role, n in roles.items() if role == pin.placement.role}
    if unsummed(request, [layer]):
        roles = {role: n for role, n in roles.items() if n == 1}
    return tuple(roles)


def _messages(conv: tuple[int, ...], fc: tuple[int, ...]) -> int:
    """The most ranks of the other role that one rank shares examples with."""

    def met(mine: tuple[int, ...], others: tuple[int, ...]) -> int:
        return max(sum(max(a, c) < min(b, d) for c, d in pairwise(others)) for a, b in pairwise(mine))

    return max(met(conv, fc), met(fc, conv))


def _sync_line(request: Request, ranks: tuple[int, ...]) -> SyncLine:
    """The all-reduce, which is a line in the bytes."""
    latency = request.all_reduce_seconds(0.0, ranks)
    return SyncLine(latency, (request.all_reduce_seconds(1e9, ranks) - latency) / 1e9)


def _search(request: Request, rules: CutRules, divisions: list[Division]) -> Offer:
    """The best assignment of all divisions; `divisions` have the most promising first."""
    deadline = time.monotonic() + request.time_limit
    best: tuple[float, Division, frozenset[str]] | None = None
    for division in divisions:
        if best is not None and division.most <= best[0]:
            break
        fc = best_suffix(division.problem)
        if fc is not None and (best is None or division.rate(fc) > best[0]):
            best = division.rate(fc), division, fc
    unknown, searched = 0.0, False  # samples per second of what is left open
    for division in divisions:
        if best is not None and division.most <= best[0]:
            break
        left = deadline - time.monotonic()
        if left <= 0:
            unknown = max(unknown, division.most)
            continue
        found = solve(division.problem, left)
        searched = True
        if found.status in ("feasible", "unknown"):
            unknown = max(unknown, division.batch / found.bound if found.bound else math.inf)
        if found.fc is not None and (best is None or division.rate(found.fc) > best[0]):
            best = division.rate(found.fc), division, found.fc
    if best is not None:
        rate, division, fc = best
        offer = division.offer(fc, most=max(rate, unknown))
        return replace(offer, searched=searched or unknown <= rate)
    if unknown:
        return _too_slow(request, unknown)
    return _nearest(request, rules, divisions)


def _nearest(request: Request, rules: CutRules, divisions: list[Division]) -> Offer:
    """What is short when nothing fits: the division and the cut that need the least memory."""
    deadline = time.monotonic() + request.time_limit
    nearest: tuple[float, Division, frozenset[str]] | None = None
    for division in divisions:
        found = least_memory(division.problem, max(deadline - time.monotonic(), 1.0))
        if found.fc is not None:
            need = max(division.problem.memory_of(found.fc).values())
            if nearest is None or need < nearest[0]:
                nearest = need, division, found.fc
        if time.monotonic() > deadline:
            break
    if nearest is None and found.status != "infeasible":
        return _too_slow(request, 0.0)
    if nearest is None:
        return Offer(NAME, feasible=False, why=uncut(rules, request.pins, "leaves parameters on both sides"))
    _, division, fc = nearest
    why = []
    conv = {n.name: n.conv_memory for n in division.problem.layers if n.name not in fc}
    for role, need in division.problem.memory_of(fc).items():
        roles: tuple[str, ...] = (role,)
        needed = conv
        if role == "fc":
            needed = {n.name: n.fc_memory for n in division.problem.layers if n.name in fc}
            if division.problem.shared:
                roles, needed = tuple(division.roles), {**conv, **needed}
        why += shortage(roles, division.roles[role], need, division.problem.memory, needed)
    return division.offer(fc, why=f"even in the cut that needs least {', and '.join(why)}")


def _too_slow(request: Request, most: float) -> Offer:
    why = f"none was found in {request.time_limit:g} s; raise time_limit"
    return Offer(NAME, feasible=False, why=why, most=most, searched=False)
