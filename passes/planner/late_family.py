"""Offers of late multiply: fc layers replicated, X and E gathered in place of gradients (Practical Lessons 2.1).

A linear layer is late-multiplied where that is faster than the ring all-reduce of its gradient: with b examples on each
of n ranks, r rows of each and features i -> o,

    (n - 1) (b r (i + o)) / bandwidth + (n - 1) / 3 compute  <  2 (n - 1) / n (i + 1) o / bandwidth        (1)
"""

from __future__ import annotations

from splitc.ir.graph import tensor_spec
from splitc.ir.linears import Linear
from splitc.ir.strategies import LateMultiply
from splitc.passes.planner.arrange import LayerChoice, with_pins
from splitc.passes.planner.fitting import asked_by, too_small, unfit
from splitc.passes.planner.pins import contradictions
from splitc.passes.planner.pricing import Pricing
from splitc.passes.planner.request import Offer, Request, largest


def late_multiply(pricing: Pricing, options: LateMultiply) -> Offer:
    """Late multiply of the linear layers for which it is the faster way; of all of them where it is for none."""
    request, name = pricing.request, options.name
    if why := contradictions(request.pins, name) or too_small(request, name):
        return Offer(name, feasible=False, why="; ".join(why))
    linears = {k: v for k, v in request.linears.items() if request.gradient_of(k)}
    if not linears:
        return Offer(name, feasible=False, why="no linear layer of the model trains a weight of its own")
    cheaper = [layer for layer, uses in linears.items() if _saves(request, layer, uses) > 0]
    wishes = with_pins(
        request,
        {
            layer.name: LayerChoice(sync="late_multiply" if layer.name in (cheaper or linears) else "all_reduce")
            for layer in request.program.layers
        },
    )
    why = unfit(request, wishes)
    if not why and not any(wishes[layer].sync == "late_multiply" for layer in linears):
        why = [f"no linear layer is left to multiply late{asked_by(request, linears)}"]
    if why:
        return Offer(name, feasible=False, why="; ".join(why))
    return pricing.arranged(name, wishes)


def _saves(request: Request, layer: str, uses: tuple[Linear, ...]) -> float:
    """Seconds: the right side of (1) less the left one."""
    n, everyone = request.world, range(request.world)
    batch = largest(request.bounds(n))
    gathered = sum(spec.nbytes(batch) for use in uses for spec in (tensor_spec(use.value), tensor_spec(use.node)))
    compute = request.seconds(layer, batch, request.cluster.device_for(n))
    late = request.all_gather_seconds(n * gathered, everyone) + (n - 1) / 3 * compute
    return request.all_reduce_seconds(request.gradient_of(layer), everyone) - late
