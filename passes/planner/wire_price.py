"""What a step of a plan costs, from what its program would compute and put on the wire.

    T = sum over roles   compute of the busiest rank                                      (1)
      + sum over values  the longest that a rank is busy with it                          (2)
      + sync             of roles that share ranks one after the other, else together     (3)

A rank is busy with a value for latency + bytes / bandwidth of each message, of the direction that takes it longer; with
a collective for what `alpha_beta` says of it; each on the link that joins its ranks.  A link that the ranks
of a host share is busy with what all of them send over it.  What happens once a round counts by its part in a step.
No transfer is taken to hide behind compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from splitc.cost_models.network.alpha_beta import concurrent
from splitc.ir.cluster import Cluster, Link
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.passes.planner.request import Request
from splitc.runtime.collectives.layouts import State


def step_seconds(request: Request, program: LoweredProgram) -> float:
    """Seconds of a step of a rewritten program: equations (1) to (3)."""
    plan = program.plan
    return compute_seconds(request, plan) + _exchange_seconds(request, program)


def compute_seconds(request: Request, plan: Plan) -> float:
    """Equation (1)."""
    return sum(layer_seconds(request, plan, layer.name) for layer in request.program.layers)


def layer_seconds(request: Request, plan: Plan, layer: str) -> float:
    """Compute of a layer on the busiest rank of its role in one step.

    Groups of K compute on the examples of all members: a layer they share takes 1/K of it, another one all of it, but
    one in state batch on a rank's own.
    A late-multiplied layer computes the weight gradient, a third of its work, of all ranks' examples.
    """
    place = plan.placements[layer]
    busy = len({rank for ranks in plan.roles.values() for rank in ranks})
    ranks = plan.roles[place.role]
    grouping = plan.groups.get(place.role)
    batch = max(plan.peak_batch(place.role, rank) for rank in (ranks[0], ranks[-1]))
    if grouping is None or (place.holding == "replicated" and place.state == State.BATCH):
        batch = plan.largest_batch(place.role)
    seconds = request.seconds(layer, batch, busy)
    if grouping is not None:
        seconds *= plan.num_microbatches(place.role)
        if place.holding == "sharded":
            seconds /= grouping.size
    if place.holding == "subnet":
        seconds *= request.subnet_share(layer)
    if place.sync == "late_multiply":
        seconds *= 1 + (len(ranks) - 1) / 3
    return seconds


def _exchange_seconds(request: Request, program: LoweredProgram) -> float:
    """Equations (2) and (3)."""
    plan = program.plan
    values: dict[Payload, float] = defaultdict(float)
    for value, seconds in _each_busy(request.cluster, program):
        values[value] = max(values[value], seconds)
    by_role: dict[str, float] = defaultdict(float)
    for value in [value for value in values if value.what is What.BUCKET]:
        by_role[value.role] += values.pop(value)
    shared = len({rank for ranks in plan.roles.values() for rank in ranks}) < sum(map(len, plan.roles.values()))
    sync = sum(by_role.values()) if shared else max(by_role.values(), default=0.0)
    return sum(values.values()) + sync


def _each_busy(cluster: Cluster, program: LoweredProgram) -> Iterator[tuple[Payload, float]]:
    """Yield (value, seconds) for every value that a rank, or the link of a host, is busy with."""
    plan = program.plan
    leaving: dict[tuple[int, Payload], list[WireOp]] = defaultdict(list)
    for rank in _candidates(cluster, program):
        here: dict[Payload, list[WireOp]] = defaultdict(list)
        for op in wire(program, rank):
            here[_value(op)].append(op)
        for value, ops in here.items():
            yield value, _busy([(op, _link(cluster, plan, rank, op)) for op in ops])
            if cluster.link_of(rank).shared:
                host = cluster.host_of(rank)
                leaving[host, value] += [
                    op for op in ops if op.kind != "collective" and cluster.host_of(op.ranks[0]) != host
                ]
    for (host, value), ops in leaving.items():
        ranks = [rank for rank in range(plan.world) if cluster.host_of(rank) == host]
        link = min(map(cluster.link_of, ranks), key=lambda link: link.bandwidth)
        sent = concurrent((op.sent for op in ops if op.kind == "send"), link)
        received = concurrent((op.nbytes for op in ops if op.kind == "recv"), link)
        yield value, max(sent, received) if link.duplex else sent + received


def _candidates(cluster: Cluster, program: LoweredProgram) -> list[int]:
    """Return ranks that include the busiest: the ends of each rank program, their hosts, ranks with other links."""
    ends = {rank for each in program.rank_programs for rank in (each.ranks[0], each.ranks[-1])}
    hosts = {cluster.host_of(rank) for rank in ends}
    odd = {min({*part.ranks} & {*each.ranks}, default=-1) for part in program.rank_programs for each in cluster.unlike}
    ranks = dict.fromkeys(rank for part in program.rank_programs for rank in part.ranks)
    return [rank for rank in ranks if rank in odd or cluster.host_of(rank) in hosts]


def _link(cluster: Cluster, plan: Plan, rank: int, op: WireOp) -> Link:
    """What an operation of `rank` runs on; all groups of a role communicate at once, and so do all sets of replicas."""
    if op.kind != "collective":
        return cluster.link_between(rank, op.ranks[0])
    rings = op.algorithm != "recursive_doubling"
    if cluster.local_link is not None:
        for role, grouping in plan.groups.items():
            ranks, size = plan.roles[role], grouping.size
            groups = [ranks[k : k + size] for k in range(0, len(ranks), size)]
            for alike in (groups, [ranks[k::size] for k in range(size)]):
                if op.ranks in alike:
                    return cluster.link_over(*alike, rings=rings)
    return cluster.link_over(op.ranks, rings=rings)


def _value(op: WireOp) -> Payload:
    """Return the cut, node or bucket that an operation is a part of: all messages of a cut are parts of one value."""
    return op.payload if op.kind == "collective" else replace(op.payload, rows=(0, 0), columns=None, more=0)


def _busy(ops: Iterable[tuple[WireOp, Link]]) -> float:
    """Seconds of a rank's operations, each on its link, or at its measured rate."""
    latency = 0.0
    sent: dict[tuple[float, bool], float] = defaultdict(float)
    received: dict[tuple[float, bool], float] = defaultdict(float)
    for op, link in ops:
        if rate := link.collectives.get(op.algorithm):
            latency += op.times * rate.latency * (len(op.ranks) - 1) * (2 if op.algorithm == "all_reduce" else 1)
            sent[rate.bandwidth, True] += op.per_step
            continue
        kind = link.bandwidth, link.duplex
        each_way = 1 if op.algorithm in ("", "all_to_all") else 2
        latency += op.times * link.latency * each_way * max(len(op.ranks) - 1, 1)
        if op.kind == "recv":
            received[kind] += op.nbytes
        else:
            sent[kind] += op.per_step * (2 if op.algorithm == "server" else 1)  # it answers when it has all
            received[kind] += op.per_step if op.kind == "collective" else 0.0
    seconds = latency
    for bandwidth, duplex in sent | received:
        there, back = sent[bandwidth, duplex], received[bandwidth, duplex]
        seconds += (max(there, back) if duplex else there + back) / bandwidth
    return seconds
