"""Propose late multiply (Practical Lessons 2.1).

Linear layers are replicated; their inputs X and errors E are gathered, in place of their gradients.

A linear layer is late-multiplied where that is faster than the ring all-reduce of its gradient: with b examples on each
of n ranks, r rows of each and features i -> o,

    (n - 1) (b r (i + o)) / bandwidth + (n - 1) / 3 compute  <  2 (n - 1) / n (i + 1) o / bandwidth        (1)
"""

from __future__ import annotations

from splitc.ir.graph import tensor_spec
from splitc.ir.linears import Linear
from splitc.ir.strategies import LateMultiply
from splitc.passes.planner.assign_roles import LayerChoice, apply_pins
from splitc.passes.planner.pin_checks import contradictions, pinned_by, too_small, unmet
from splitc.passes.planner.price_choices import price_choices
from splitc.passes.planner.priced_plan import PricedPlan, infeasible
from splitc.passes.planner.request import Request, largest


def late_multiply(request: Request, options: LateMultiply) -> PricedPlan:
    """Late multiply of the linear layers for which it is the faster way; of all of them where it is for none."""
    name = options.name
    if why := contradictions(request, name) or too_small(request, name):
        return infeasible(name, why)
    linears = {k: v for k, v in request.linears.items() if request.gradient_of(k)}
    if not linears:
        return infeasible(name, ["no linear layer of the model trains a weight of its own"])
    cheaper = [layer for layer, uses in linears.items() if _saves(request, layer, uses) > 0]
    choices = apply_pins(
        request,
        {
            layer.name: LayerChoice(sync="late_multiply" if layer.name in (cheaper or linears) else "all_reduce")
            for layer in request.program.layers
        },
    )
    why = unmet(request, choices)
    if not why and not any(choices[layer].sync == "late_multiply" for layer in linears):
        why = [f"no linear layer is left to multiply late{pinned_by(request, linears)}"]
    if why:
        return infeasible(name, why)
    return price_choices(request, name, choices)


def _saves(request: Request, layer: str, uses: tuple[Linear, ...]) -> float:
    """Seconds: the right side of (1) less the left one."""
    n, everyone = request.world, range(request.world)
    batch = largest(request.bounds(n))
    gathered = sum(spec.nbytes(batch) for use in uses for spec in (tensor_spec(use.value), tensor_spec(use.node)))
    compute = request.seconds(layer, batch, n)
    late = request.all_gather_seconds(n * gathered, everyone) + (n - 1) / 3 * compute
    return request.all_reduce_seconds(request.gradient_of(layer), everyone) - late
