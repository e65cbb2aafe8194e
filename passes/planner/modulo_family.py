"""Offers of modulo_shard: fc layers divided over groups of mp ranks (SplitBrain 3, Krizhevsky 2014).

A layer is divided over a group of K where the time it saves, of computing and of summing its gradient, is more than
what gathering its output takes                                                                              (1)

This is the computation-to-communication ratio (CCR) of SplitBrain's listing 1, with the ratio at which both take as
long on the cluster at hand as its threshold.  Where modulo_shard was asked for by name, groups are for memory too; a
layer is then also divided where

    bytes of its parameters  >  bytes of its gathered output, for one rank's batch                           (2)

which is the same ratio in bytes, with 1 as its threshold: a linear layer computes in proportion to its parameters, and
communicates its output.  `auto` weighs seconds alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from splitc.ir.graph import tensor_spec
from splitc.ir.linears import Linear
from splitc.ir.strategies import ModuloShard
from splitc.passes.planner.arrange import LayerChoice, with_pins
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.fitting import asked_by, too_small, unfit, whole_unless_linear
from splitc.passes.planner.pins import contradictions
from splitc.passes.planner.pricing import Pricing
from splitc.passes.planner.request import Offer, Request, largest

_PRICED = 4  # arrangements that get a full price, the best by their estimate

Linears = Mapping[str, tuple[Linear, ...]]
Wishes = dict[str, LayerChoice]


def modulo_shard(pricing: Pricing, options: ModuloShard, by_name: bool = False) -> Offer:
    """The fastest group size, and the fastest first layer to shard, of those asked for.

    by_name: the user asked for this strategy, so layers are divided for memory too.
    """
    request, name = pricing.request, options.name
    exact = options.is_exact
    linears = {k: v for k, v in request.linears.items() if request.gradient_of(k)}
    sizes = [k for k in range(2, request.world + 1) if request.world % k == 0 and options.mp in (None, k)]
    why = contradictions(request.pins, name) or too_small(request, name)
    if not why and not linears:
        why = ["no linear layer of the model has parameters of its own to divide"]
    if not why and not sizes:
        why = [f"groups of mp = {options.mp} do not divide {request.world} ranks"]
    if why:
        return Offer(name, feasible=False, why="; ".join(why), exact=exact)
    possible, refused = _possible(request, linears, sizes, by_name)
    if not possible:
        nearest = min(refused, key=len, default=["the linear layers cannot be parted from the layers before them"])
        return Offer(name, feasible=False, why="; ".join(nearest), exact=exact)
    estimated = sorted(possible, key=lambda wishes: _estimate(request, wishes))
    scheme, updates = options.scheme or "B/K", options.updates or "once"
    offers = [pricing.arranged(name, wishes, scheme, updates, exact) for wishes in estimated[:_PRICED]]
    return max(offers, key=lambda offer: (offer.feasible, -offer.step_seconds))


def _possible(
    request: Request, linears: Linears, sizes: Iterable[int], by_name: bool
) -> tuple[list[Wishes], list[list[str]]]:
    """The wishes that keep to the pins, each once; and for the others, why they do not."""
    possible: list[Wishes] = []
    refused: list[list[str]] = []
    for size in sizes:
        for first in _sharded_from(request, linears, size, by_name):
            wishes = with_pins(request, first, fc=LayerChoice(group=size, holding="sharded", split="columns"))
            if any(layer in linears and wish.group > 1 and first[layer].group == 1 for layer, wish in wishes.items()):
                continue  # a pin divides a layer before the first one: another one is the first
            why = unfit(request, wishes, size)
            wishes = whole_unless_linear(request, wishes)
            if not why and not any(wish.holding == "sharded" for wish in wishes.values()):
                why = [f"nothing is left to divide: no linear layer may be sharded{asked_by(request, linears)}"]
            if why:
                refused.append(why)
            elif wishes not in possible:
                possible.append(wishes)
    return possible, refused


def _sharded_from(request: Request, linears: Linears, size: int, by_name: bool) -> Iterable[Wishes]:
    """For every linear layer as the first that is divided: it and all that follow from it are in groups."""
    rules = cut_rules(request.program)
    for first in linears:
        inside = {first}
        for _ in request.program.layers:
            more = {j for i, j in rules.order if i in inside}
            more |= {j for i, j in rules.together if i in inside} | {i for i, j in rules.together if j in inside}
            if more <= inside:
                break
            inside |= more
        if inside & set(rules.conv_only):
            continue
        wishes = {
            layer.name: LayerChoice(group=size if layer.name in inside else 1) for layer in request.program.layers
        }
        for layer, uses in linears.items():
            if layer in inside and (
                layer == first
                or _seconds_saved(request, layer, uses, size) > 0
                or (by_name and _bytes_saved(request, layer, uses) > 0)
            ):
                wishes[layer] = replace(wishes[layer], holding="sharded", split="columns")
        yield wishes


def _seconds_saved(request: Request, layer: str, uses: tuple[Linear, ...], size: int) -> float:
    """What dividing a layer of a group saves, less what gathering its output takes: equation (1)."""
    n, groups = request.world, request.groups(size)
    batch = size * largest(request.bounds(n))
    device = request.cluster.device_for(n)
    saved = request.seconds(layer, batch, device) * (1 - 1 / size)
    gradient = request.gradient_of(layer)
    if len(groups) > 1:
        saved += request.all_reduce_seconds(gradient, *request.replicas(size))
        saved -= request.all_reduce_seconds(gradient / size, *request.replicas(size))
    gathered = sum(request.all_gather_seconds(tensor_spec(use.node).nbytes(batch), *groups) for use in uses)
    return saved - gathered


def _bytes_saved(request: Request, layer: str, uses: tuple[Linear, ...]) -> float:
    """The left side of (2) less the right one."""
    batch = largest(request.bounds(request.world))
    gathered = sum(tensor_spec(use.node).nbytes(batch) for use in uses)
    return float(sum(holding.nbytes for holding in request.held[layer] if holding.parameter) - gathered)


def _estimate(request: Request, wishes: Wishes) -> float:
    """Seconds of a step, roughly: which of many first layers are worth a full price."""
    n = request.world
    batch, device = largest(request.bounds(n)), request.cluster.device_for(n)
    seconds = 0.0
    for layer, wish in wishes.items():
        gradient, groups = request.gradient_of(layer), request.groups(wish.group)
        part = wish.group if wish.holding == "sharded" else 1
        seconds += request.seconds(layer, batch * wish.group, device) / part
        if gradient and len(groups) > 1:
            seconds += request.all_reduce_seconds(gradient / part, *request.replicas(wish.group))
        if wish.holding == "sharded":
            seconds += sum(
                2 * request.all_gather_seconds(tensor_spec(use.node).nbytes(batch * wish.group), *groups)
                for use in request.linears[layer]
            )
    return seconds
