"""Propose modulo_shard: linear layers divided over groups of mp ranks (SplitBrain 3, Krizhevsky 2014).

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
from splitc.passes.planner.assign_roles import LayerChoice, apply_pins
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.pin_checks import contradictions, pinned_by, shard_only_linear, too_small, unmet
from splitc.passes.planner.price_choices import price_choices
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request, largest

_PRICED = 4  # choices that get a full price, the best by their estimate

Linears = Mapping[str, tuple[Linear, ...]]
Choices = dict[str, LayerChoice]


def modulo_shard(request: Request, options: ModuloShard, by_name: bool = False) -> PricedPlan:
    """The fastest group size, and the fastest first layer to shard, of those asked for.

    by_name: the user asked for this strategy, so layers are divided for memory too.
    """
    name = options.name
    exact = options.is_exact
    linears = {k: v for k, v in request.linears.items() if request.gradient_of(k)}
    most = request.world // 2 if options.period else request.world  # several groups, that they may average
    sizes = [k for k in range(2, most + 1) if request.world % k == 0 and options.mp in (None, k)]
    why = contradictions(request, name) or too_small(request, name)
    if not why and not linears:
        why = ["no linear layer of the model has parameters of its own to divide"]
    if not why and not sizes:
        several = " into several, whose parameters could be averaged" if options.period else ""
        why = [f"groups of mp = {options.mp or 'two or more'} do not divide {request.world} ranks{several}"]
    if why:
        return infeasible(name, why, exact)
    units = {size: _unit_of(request, size) if options.period else request for size in sizes}
    possible, refused = _possible(request, linears, units, by_name)
    if not possible:
        nearest = min(refused, key=len, default=["the linear layers cannot be parted from the layers before them"])
        return infeasible(name, nearest, exact)
    estimated = sorted(possible, key=lambda choices: _estimate(units[_size(choices)], choices))
    scheme, updates = options.scheme or "B/K", options.updates or "once"
    priced = [
        price_choices(request, name, choices, scheme, updates, exact, options.rounds(_size(choices)))
        for choices in estimated[:_PRICED]
    ]
    return max(priced, key=lambda plan: (plan.feasible, -plan.seconds))


def _size(choices: Choices) -> int:
    """The size of the groups."""
    return max(choice.group for choice in choices.values())


def _unit_of(request: Request, size: int) -> Request:
    """The request of one group, where groups train by themselves."""
    return replace(request, world=size, global_batch=size * largest(request.bounds(request.world)))


def _possible(
    request: Request, linears: Linears, units: Mapping[int, Request], by_name: bool
) -> tuple[list[Choices], list[list[str]]]:
    """The choices that keep to the pins, each once; and for the others, why they do not."""
    possible: list[Choices] = []
    refused: list[list[str]] = []
    for size, unit in units.items():
        for first in _sharded_from(unit, linears, size, by_name):
            choices = apply_pins(request, first, second=LayerChoice(group=size, holding="sharded", split="columns"))
            if any(choices[layer].group > 1 and first[layer].group == 1 for layer in linears):
                continue  # a pin divides a layer before the first one: another one is the first
            why = unmet(request, choices, size)
            choices = shard_only_linear(request, choices)
            if not why and not any(choice.holding == "sharded" for choice in choices.values()):
                why = [f"nothing is left to divide: no linear layer may be sharded{pinned_by(request, linears)}"]
            if why:
                refused.append(why)
            elif choices not in possible:
                possible.append(choices)
    return possible, refused


def _sharded_from(request: Request, linears: Linears, size: int, by_name: bool) -> Iterable[Choices]:
    """For every linear layer as the first that is divided: it and all that follow from it are in groups."""
    rules = cut_rules(request.program)
    for first in linears:
        inside = following(rules, [first])
        if inside & set(rules.reader_only):
            continue
        choices = {
            layer.name: LayerChoice(group=size if layer.name in inside else 1) for layer in request.program.layers
        }
        for layer, uses in linears.items():
            if layer in inside and (
                layer == first
                or _seconds_saved(request, layer, uses, size) > 0
                or (by_name and _bytes_saved(request, layer, uses) > 0)
            ):
                choices[layer] = replace(choices[layer], holding="sharded", split="columns")
        yield choices


def _seconds_saved(request: Request, layer: str, uses: tuple[Linear, ...], size: int) -> float:
    """What dividing a layer of a group saves, less what gathering its output takes: equation (1)."""
    n, groups = request.world, request.groups(size)
    batch = size * largest(request.bounds(n))
    saved = request.seconds(layer, batch, n) * (1 - 1 / size)
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


def _estimate(request: Request, choices: Choices) -> float:
    """Seconds of a step, roughly: which of many first layers are worth a full price."""
    n = request.world
    batch = largest(request.bounds(n))
    seconds = 0.0
    for layer, choice in choices.items():
        gradient, groups = request.gradient_of(layer), request.groups(choice.group)
        part = choice.group if choice.holding == "sharded" else 1
        seconds += request.seconds(layer, batch * choice.group, n) / part
        if gradient and len(groups) > 1:
            seconds += request.all_reduce_seconds(gradient / part, *request.replicas(choice.group))
        if choice.holding == "sharded":
            seconds += sum(
                2 * request.all_gather_seconds(tensor_spec(use.node).nbytes(batch * choice.group), *groups)
                for use in request.linears.get(layer, ())
            )
    return seconds
