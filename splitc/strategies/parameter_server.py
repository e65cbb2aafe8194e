"""Synchronous parameter servers: workers compute every layer, servers hold the parameters.

    t_ps = 2 n_w P / (n_s B) + T_ps        Stanza (Wu et al. 2018), equation (6)

P is the bytes of all gradients, B the bandwidth of a server's link, T_ps the compute of a whole step on one worker, n_w
and n_s the numbers of workers and servers; the latency of a server's messages is added, 2 n_w for each bucket.  The
paper has fewer servers than workers; with more, a worker's link is the bottleneck and carries 2 P in 2 n_s messages for
each bucket.  Servers run on the last ranks, which are workers too if the servers are `beside` them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc import units
from splitc.cost_models.memory.memory import gradient_nbytes
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import SERVER, Plan
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.planner.divisions import counts
from splitc.passes.planner.pin_checks import PinWords, unsummed
from splitc.passes.planner.price_plan import problems_of
from splitc.passes.planner.priced_plan import PricedPlan, infeasible, shortage
from splitc.passes.planner.request import Request, largest, smallest
from splitc.passes.planner.strategy import Count, Flag, Strategy
from splitc.runtime.servers.parameter_server import COALESCED_BELOW

NAME = "parameter_server"

PAIRS = 400
"""Servers x workers whose messages are simulated, in seconds; those of 512 and 512 would take hours."""


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """Workers push gradients to servers and pull parameters, synchronously (Stanza 2.2, 7.1).

    servers: how many; beside: on ranks that are workers too; overlap: layer by layer while workers compute, or all at
    once as in the paper.
    """

    name = NAME
    pins = PinWords(role="worker", syncs=(NAME, "none"))
    servers: Count | None = None
    beside: Flag | None = None
    overlap: Flag | None = None

    def searches(self, by_name: bool) -> Sequence[bool]:
        return ()

    def proposals(self, request: Request) -> list[PricedPlan]:
        """The best number of servers, by trying all (Stanza 7.2), or that asked for; beside workers, all ranks."""
        given = self.servers or (request.world if self.beside else None)
        numbers = [given] if given else counts(request.world) or [1]
        priced = [_priced(request, self, servers) for servers in numbers]
        return [max(priced, key=lambda plan: (plan.feasible, plan.bound))]


def _priced(request: Request, options: ParameterServer, servers: int) -> PricedPlan:
    beside = bool(options.beside)
    workers = request.world if beside else request.world - servers
    problems = options.impossible(request) + unsummed(request, request.pins)
    if workers < 1 or servers > request.world:
        room = f"a world of {request.world} has no room for {servers} server{'s' if servers > 1 else ''} and a worker"
        return infeasible(NAME, [*problems, room])
    layers = [layer.name for layer in request.program.layers]
    bounds = request.bounds(workers)
    batch = largest(bounds)
    roles = {"worker": tuple(range(workers))}
    serving = tuple(range(request.world - servers, request.world))
    link = request.cluster.link_across(roles["worker"], serving)
    gradients = sum(map(request.gradient, layers))
    if not gradients:
        problems.append("no parameter trains, so there is nothing to serve")
    if not smallest(bounds):
        problems.append(f"{bounds[-1]} examples cannot be shared out to {workers} workers")
    needed = {layer: served_memory(request, layer, batch) for layer in layers}
    each, have = server_memory(request, workers, servers, beside), request.memory_of(request.world)
    short_roles: tuple[str, ...] = ("worker", SERVER) if beside else ("worker",)
    short_ranks = serving if beside else roles["worker"]
    problems += shortage(short_roles, short_ranks, sum(needed.values()) + each * beside, have, needed)
    if not beside and each > have:
        problems.append(f"each server needs {units.nbytes(each)} of memory and has {units.nbytes(have)}")
    computing = sum(request.seconds(layer, batch, workers) for layer in layers)
    form = request.form("gradients")  # of pushes; pulls are as they are
    exchange = (1 + form.ratio) * workers * gradients / (min(servers, workers) * link.bandwidth)
    exchange += form.cast * workers * gradients / min(servers, workers)
    messages = max(servers, workers) * -(-gradients // BucketGradients.nbytes)  # of the busiest rank, one way
    seconds = computing + exchange + 2 * messages * link.latency
    syncs = {layer: NAME if request.gradient_of(layer) else "none" for layer in layers}
    placements = {layer: LayerPlacement("worker", "replicated", sync) for layer, sync in syncs.items()}
    plan = Plan(
        NAME,
        request.world,
        roles,
        placements,
        {"worker": bounds},
        servers=serving,
        overlap=options.overlap is not False,
        all_reduce=request.all_reduce,
    )
    plan = request.order.of(plan)
    problems += problems_of(request, plan)
    bound = 0.0 if problems or not seconds else plan.global_batch / seconds
    closed = servers * workers > PAIRS
    return PricedPlan(NAME, plan, seconds, seconds, bound, infeasible_because="; ".join(problems), closed=closed)


def server_memory(request: Request, workers: int, servers: int, beside: bool) -> float:
    """Bytes that a server needs for its rows, not counting the memory of a worker on the same rank.

    While one bucket is summed, all workers send the gradients of the next one; with servers beside workers, of all
    buckets.  The gradient that arrives first becomes the sum.  Small parameters, and their gradients, are copied into
    shared messages.
    """
    sizes = [h.nbytes for held in request.held.values() for h in held if h.trainable]
    whole, bucket = sum(sizes), BucketGradients.nbytes + max(sizes, default=0)
    arriving = whole if beside else min(whole, 2 * bucket)
    summed, kept = whole - arriving, request.optimizer_copies + (not beside)
    packed = sum(size for size in sizes if size < COALESCED_BELOW)
    return (kept * whole + summed + workers * arriving + packed) / servers + packed * beside


def served_memory(request: Request, layer: str, batch: int) -> float:
    """Bytes that a layer needs on a worker; the servers hold the optimizer state and the summed gradients."""
    held = request.held[layer]
    return sum(h.nbytes for h in held) + request.program.costs[layer].saved_bytes_at(batch) + gradient_nbytes(held)
