"""What a step of a plan costs, from what its program would compute and put on the wire.

    T = sum over roles   compute of the busiest rank                                      (1)
      + sum over values  the longest that a rank is busy with it                          (2)
      + sync             of roles that share ranks one after the other, else together     (3)

A rank is busy with a value for latency + bytes / bandwidth of each message, of the direction that takes it longer; with
a collective for what `cost_models.alpha_beta` says of it.  No transfer is taken to hide behind compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from passes.families import Request
from splitc.cluster import Link
from splitc.pipeline import Pass
from splitc.plan import Plan
from splitc.program import Program
from splitc.wire import WireOp, wire


def rewritten(request: Request, plan: Plan, passes: Iterable[Pass]) -> Program:
    """The program of a plan that is only being considered."""
    program = replace(request.program, plan=plan)
    for each in passes:
        program = each.run(program)
    return program


def step_seconds(request: Request, program: Program) -> float:
    """Seconds of a step of a rewritten program: equations (1) to (3)."""
    plan = program.required_plan
    return compute_seconds(request, plan) + _exchange_seconds(request, program)


def compute_seconds(request: Request, plan: Plan) -> float:
    """Equation (1)."""
    return sum(layer_seconds(request, plan, layer.name) for layer in request.program.layers)


def layer_seconds(request: Request, plan: Plan, layer: str) -> float:
    """Compute of a layer on the busiest rank of its role in one step.

    Groups of K compute on the examples of all members: a layer they share takes 1/K of it, another one all of it.
    A late-multiplied layer computes the weight gradient, a third of its work, of all ranks' examples.
    """
    place = plan.placements[layer]
    assert place.role is not None
    busy = len({rank for ranks in plan.roles.values() for rank in ranks})
    device = request.cluster.device_for(busy)
    ranks = plan.roles[place.role]
    grouping = plan.groups.get(place.role)
    batch = max(plan.worked(place.role, rank) for rank in (ranks[0], ranks[-1]))
    if grouping is None:
        batch = plan.largest_batch(place.role)
    seconds = request.seconds(layer, batch, device)
    if grouping is not None:
        seconds *= grouping.turns
        if place.holding == "sharded":
            seconds /= grouping.size
    if place.sync == "late_multiply":
        seconds *= 1 + (len(ranks) - 1) / 3
    return seconds


def _exchange_seconds(request: Request, program: Program) -> float:
    """Equations (2) and (3)."""
    plan, link = program.required_plan, request.cluster.link
    values: dict[str, float] = defaultdict(float)
    syncs: dict[str, float] = defaultdict(float)
    for rank in dict.fromkeys(rank for part in program.parts for rank in (part.ranks[0], part.ranks[-1])):
        here: dict[str, list[WireOp]] = defaultdict(list)
        for op in wire(program, rank):
            here[_value(op)].append(op)
        for value, ops in here.items():
            into = syncs if ".bucket" in value else values
            into[value] = max(into[value], _busy(ops, link))
    by_role: dict[str, float] = defaultdict(float)
    for value, seconds in syncs.items():
        by_role[value.partition(".")[0]] += seconds
    shared = len({rank for ranks in plan.roles.values() for rank in ranks}) < sum(map(len, plan.roles.values()))
    sync = sum(by_role.values()) if shared else max(by_role.values(), default=0.0)
    return sum(values.values()) + sync


def _value(op: WireOp) -> str:
    """What an operation belongs to: the cut, the node or the bucket, without examples and turn."""
    return op.label.partition("[")[0] if op.kind != "collective" else op.label


def _busy(ops: Iterable[WireOp], link: Link) -> float:
    sent = received = latency = 0.0
    for op in ops:
        latency += link.latency * (1 if op.kind != "collective" else 2 * (len(op.ranks) - 1))
        if op.kind == "recv":
            received += _nbytes(op)
        else:
            sent += op.sent
            received += op.sent if op.kind == "collective" else 0.0
    busiest = max(sent, received) if link.duplex else sent + received
    return latency + busiest / link.bandwidth


def _nbytes(op: WireOp) -> float:
    numel = 1
    for n in op.shape:
        numel *= n
    return float(numel * op.dtype.itemsize)
