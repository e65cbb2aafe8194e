"""The plans that need no search: all layers on one rank, or on every rank."""

from __future__ import annotations

from splitc.passes.planner.pin_checks import contradictions, unsummed
from splitc.passes.planner.priced_plan import PricedPlan, only_plan, shortage
from splitc.passes.planner.request import Request, largest


def single_device(request: Request) -> PricedPlan:
    """All layers on rank 0; the other ranks are in no role."""
    return on_all(request, "single_device", 1)


def data_parallel(request: Request) -> PricedPlan:
    """All layers on every rank, the gradients summed by a ring all-reduce."""
    return on_all(request, "data_parallel", request.world)


def on_all(request: Request, strategy: str, ranks: int) -> PricedPlan:
    """The one plan in which `ranks` ranks run all layers."""
    layers = [layer.name for layer in request.program.layers]
    bounds = request.bounds(ranks)
    batch = largest(bounds)
    gradient = sum(request.gradient(layer) for layer in layers)
    seconds = sum(request.seconds(layer, batch, ranks) for layer in layers)
    if gradient:
        seconds += request.all_reduce_seconds(gradient, range(ranks))
    needed = {layer: request.layer_memory(layer, request.live(batch), ranks > 1) for layer in layers}
    problems = contradictions(request, strategy)
    if ranks > 1:
        problems += unsummed(request, layers)
    if bounds[-1] < ranks:
        problems.append(f"{bounds[-1]} examples cannot be shared out to {ranks} ranks")
    roles = {"all": tuple(range(ranks))}
    problems += shortage(("all",), roles["all"], sum(needed.values()), request.memory_of(ranks), needed)
    plan = request.replicated_plan(strategy, roles, {"all": bounds}, dict.fromkeys(layers, "all"))
    return only_plan(plan, seconds, problems)
