"""Explain in one sentence, with numbers, why a layer was placed as it was."""

from __future__ import annotations

from collections.abc import Sequence

from splitc import units
from splitc.ir.features import features
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.passes.planner.priced_plan import PricedPlan
from splitc.passes.planner.problem import Option
from splitc.passes.planner.request import Request, largest
from splitc.passes.planner.search import Found
from splitc.passes.planner.syncs import sync_named

_LARGE = 0.02
"""Part of the parameters from which on a layer's next best option is told."""


def explain(request: Request, priced: PricedPlan) -> dict[str, str]:
    """Layer -> one sentence."""
    if priced.plan is None:
        return {}
    reasons = {}
    batch = largest(priced.plan.batch_offsets[priced.plan.reader])
    step = sum(request.seconds(layer, batch, 1) for layer in priced.plan.placements) or 1.0
    parameters = sum(map(request.gradient, priced.plan.placements))
    for layer in priced.plan.placements:
        content = _content(request, layer, request.seconds(layer, batch, 1) / step)
        reason = f"{content}: {_reason(request, priced.plan, priced.found, layer)}"
        if priced.found is not None and request.gradient(layer) >= _LARGE * parameters:
            reason += _next(request, priced.found, layer)
        pin = request.pins.get(layer)
        reasons[layer] = reason if pin is None else f"pinned by {pin.pattern!r}; {reason}"
    return reasons


def _reason(request: Request, plan: Plan, found: Found | None, layer: str) -> str:
    if layer == request.program.in_batch and plan.sees_whole_batch(layer):
        number = len(plan.roles[plan.placements[layer].role])
        who = f"{number} ranks compute it alike" if number > 1 else "one rank computes it"
        return f"it needs the whole batch, so {who}, on all {plan.global_batch} examples"
    if found is not None and len(plan.roles) == 2 and not plan.groups:
        return _of_separation(request, plan, found, layer)
    if len(plan.roles) > 1 or any(_is_special(place) for place in plan.placements.values()):
        return _of_choice(request, plan, layer)
    (ranks,) = plan.roles.values()
    if len(ranks) == 1:
        return f"all on rank {ranks[0]}, nothing is sent"
    if not request.gradient(layer):
        return "it has no gradient to sum"
    return _ring(request, layer, "costs", ranks)


def _next(request: Request, found: Found, layer: str) -> str:
    """`; divided by columns in head, the step would take 12 ms more`, of this layer alone, by the program."""
    problem, roles = found.problem, request.role_names(len(found.division.roles))

    def how(option: Option) -> str:
        held = f"divided by {option.split}" if option.holding == "sharded" else "whole"
        return f"{held} in {roles[option.role]}{sync_named(option.sync).how}"

    chosen = problem.seconds(found.chosen)
    others = [{**found.chosen, layer: each} for each in problem.options[layer] if how(each) != how(found.chosen[layer])]
    steps = [(problem.seconds(each), how(each[layer])) for each in others if not problem.broken(each)]
    if not steps:
        return ""
    seconds, instead = min(steps)
    return f"; {instead}, the step would take {units.seconds(seconds - chosen)} more" if seconds > chosen else ""


def _is_special(place: LayerPlacement) -> bool:
    """Whether a layer is not simply replicated and all-reduced."""
    return place.holding != "replicated" or place.sync not in ("all_reduce", "none")


def _of_choice(request: Request, plan: Plan, layer: str) -> str:
    """Of a plan with layers that are divided, late-multiplied, served, or on fewer ranks than others."""
    place = plan.placements[layer]
    ranks = plan.roles[place.role]
    if not request.gradient_of(layer):
        return "it has no gradient to sum"
    if own := next(filter(None, (feature.why(plan, place) for feature in features())), ""):
        return own
    if place.sync == "average":
        return f"averaged once a round; {_ring(request, layer, 'would cost', ranks)}"
    if instead := sync_named(place.sync).instead:
        return f"{_ring(request, layer, 'would cost', ranks)}; {instead}"
    if place.holding == "sharded":
        by = f", by {place.split}" if place.split else ""
        return f"divided over groups of {place.group}{by}; {_ring(request, layer, 'would cost', ranks)}"
    if place.role in plan.groups:
        size = plan.groups[place.role].size
        replicas = [ranks[k::size] for k in range(size)]
        sums = "and its gradient with it" if size == len(ranks) else f"so {_ring(request, layer, 'costs', *replicas)}"
        return f"computed alike by the {size} ranks of a group, {sums}"
    if len(ranks) == 1:
        return f"on one rank; {_ring(request, layer, 'would cost', range(request.world))}"
    return _ring(request, layer, "costs", ranks)


def _shares(request: Request, layer: str) -> str:
    """`shares tokens.weight with tokens`, of a tied layer without parameters of its own."""
    program = request.program
    tied = next((name for name in program.layer(layer).tensors if program.tensors[name].parameter), None)
    if tied is None:
        return "holds no parameters"
    owner = next(other for other, held in request.held.items() if program.tensors[tied] in held)
    return f"shares {tied} with {owner}"


def _content(request: Request, layer: str, part: float) -> str:
    """`holds 37.7 M parameters and is 2.1 % of the computing`.  part: of the step's compute."""
    parameters = sum(tensor.numel for tensor in request.held[layer] if tensor.parameter)
    holds = f"holds {units.count(parameters)} parameters" if parameters else _shares(request, layer)
    percent = f"{100 * part:.2g}" if part < 0.995 else "100"
    return f"{holds} and is {percent} % of the computing"


def _of_separation(request: Request, plan: Plan, found: Found, layer: str) -> str:
    conv_role, fc_role = plan.roles
    option, ranks = found.chosen[layer], plan.roles[conv_role]
    if option.role:
        moved = found.problem.moved(found.chosen)
        incoming = sum(
            move.seconds for value, (start, end), move in moved if start[0] < end[0] and layer in value.reads
        )
        gradient = _ring(request, layer, "would cost", range(request.world))
        text = f"its input costs {units.seconds(incoming)}" if incoming else "its input is on its rank already"
        return f"{gradient}, {text}" if request.gradient(layer) else text
    computing = f"it takes {units.seconds(option.computing)} on each of {len(ranks)} {conv_role} ranks"
    there = [each for each in found.problem.options[layer] if each.role]
    if there:
        computing += f", and would take {units.seconds(there[0].computing)} on {fc_role}"
    if not request.gradient(layer):
        return computing
    if len(ranks) == 1:
        return f"{computing}; its gradient stays on its rank"
    return f"{computing}; {_ring(request, layer, 'costs', ranks)}"


def _ring(request: Request, layer: str, verb: str, *groups: Sequence[int]) -> str:
    """`its gradient would cost 240 ms on 10.0 Gbit/s`."""
    bandwidth = request.all_reduce_link(*groups).bandwidth
    seconds = request.all_reduce_seconds(request.gradient(layer), *groups)
    return f"its gradient {verb} {units.seconds(seconds)} on {units.bandwidth(bandwidth)}"
