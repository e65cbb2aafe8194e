"""Why every layer was placed as it was, in plain words with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from splitc import units
from splitc.passes.planner.request import Offer, Request, largest
from splitc.passes.planner.separation import Separation


def reasons(request: Request, offer: Offer) -> dict[str, str]:
    """Layer -> one sentence."""
    words = {layer: _reason(request, offer, layer) for layer in offer.role_of}
    for layer, pin in request.pins.items():
        words[layer] = f"pinned by {pin.pattern!r}; {words[layer]}"
    return words


def _reason(request: Request, offer: Offer, layer: str) -> str:
    what = _what(request, offer, layer)
    if offer.placements:
        return _elsewhere(request, offer, layer, what)
    if offer.problem is not None:
        return _separated(request, offer, offer.problem, layer, what)
    if len(offer.roles["all"]) == 1:
        return f"{what}: all on rank 0, nothing is sent"
    if not request.gradient(layer):
        return f"{what}: it has no gradient to sum"
    return f"{what}: {_ring(request, layer, 'costs', offer.roles['all'])}"


def _elsewhere(request: Request, offer: Offer, layer: str, what: str) -> str:
    """Of layers that are divided, late-multiplied, served, or on another number of ranks than the rest."""
    place = offer.placements[layer]
    ranks = offer.roles[place.role]
    if not request.gradient_of(layer):
        return f"{what}: it has no gradient to sum"
    if place.sync == "parameter_server":
        return f"{what}: its gradient goes to the servers and its parameters come back"
    if place.sync == "late_multiply":
        return f"{what}: {_ring(request, layer, 'would cost', ranks)}; its inputs and output errors travel instead"
    if place.holding == "sharded":
        by = f", by {place.split}" if place.split else ""
        return f"{what}: divided over groups of {place.group}{by}; {_ring(request, layer, 'would cost', ranks)}"
    if place.role in offer.groups:
        size = offer.groups[place.role].size
        replicas = [ranks[k::size] for k in range(size)]
        sums = "and its gradient with it" if size == len(ranks) else f"so {_ring(request, layer, 'costs', *replicas)}"
        return f"{what}: computed alike by the {size} ranks of a group, {sums}"
    if len(ranks) == 1:
        return f"{what}: on one rank; {_ring(request, layer, 'would cost', range(request.world))}"
    return f"{what}: {_ring(request, layer, 'costs', ranks)}"


def _shares(request: Request, layer: str) -> str:
    """`shares tokens.weight with tokens`, of a tied layer without parameters of its own."""
    program = request.program
    tied = next((name for name in program.layer(layer).tensors if program.tensors[name].parameter), None)
    if tied is None:
        return "holds no parameters"
    owner = next(other for other, held in request.held.items() if program.tensors[tied] in held)
    return f"shares {tied} with {owner}"


def _what(request: Request, offer: Offer, layer: str) -> str:
    """`holds 37.7 M parameters and is 2.1 % of the computing`."""
    batch = largest(next(iter(offer.examples.values())))
    device = request.cluster.device_for(1)
    seconds = {name: request.seconds(name, batch, device) for name in offer.role_of}
    part = 100 * seconds[layer] / (sum(seconds.values()) or 1.0)
    parameters = sum(holding.numel for holding in request.held[layer] if holding.parameter)
    holds = f"holds {units.count(parameters)} parameters" if parameters else _shares(request, layer)
    return f"{holds} and is {part:.2g} % of the computing"


def _separated(request: Request, offer: Offer, problem: Separation, layer: str, what: str) -> str:
    fc = {name for name, role in offer.role_of.items() if role == "fc"}
    if layer in fc:
        incoming = sum(v.seconds for v in problem.values if layer in v.readers and problem.crosses(v, fc))
        gradient = _ring(request, layer, "would cost", range(request.world))
        moved = f"its input costs {units.seconds(incoming)}" if incoming else ("its input is on its rank already")
        return f"{what}: {gradient}, {moved}" if request.gradient(layer) else f"{what}: {moved}"
    numbers = next(n for n in problem.layers if n.name == layer)
    n_c = len(offer.roles["conv"])
    computing = (
        f"it takes {units.seconds(numbers.conv_seconds)} on each of {n_c} conv ranks, "
        f"and would take {units.seconds(numbers.fc_seconds)} on fc"
    )
    if not request.gradient(layer):
        return f"{what}: {computing}"
    if n_c == 1:
        return f"{what}: {computing}; its gradient stays on its rank"
    return f"{what}: {computing}; {_ring(request, layer, 'costs', offer.roles['conv'])}"


def _ring(request: Request, layer: str, verb: str, *groups: Sequence[int]) -> str:
    """`its gradient would cost 240 ms on 10.0 Gbit/s`."""
    bandwidth = request.all_reduce_link(*groups).bandwidth
    seconds = request.all_reduce_seconds(request.gradient(layer), *groups)
    return f"its gradient {verb} {units.seconds(seconds)} on {units.bandwidth(bandwidth)}"
