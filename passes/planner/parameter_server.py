"""Synchronous parameter servers: workers compute everything, servers hold the parameters.

    t_ps = 2 n_w P / (n_s B) + T_ps        Stanza (Wu et al. 2018), equation (6)

P is the bytes of all gradients, B the bandwidth of a server's link, T_ps the compute of a whole step on one worker, n_w
and n_s the numbers of workers and servers; a server's 2 n_w messages have their latency besides.  The paper has fewer
servers than workers; with more, a worker's link is the busy one, and carries 2 P in 2 n_s messages.  Servers have ranks
of their own, the last ones, or are workers too.
"""

from __future__ import annotations

from splitc import units
from splitc.cost_models.papers.stanza import Symbols, ps_step_seconds
from splitc.ir.plan import SERVER, LayerPlacement
from splitc.ir.strategies import ParameterServer
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.planner.pins import contradictions
from splitc.passes.planner.request import Offer, Request, largest, shortage, smallest
from splitc.runtime.collectives.parameter_server import COALESCED_BELOW

NAME = "parameter_server"


def parameter_server(request: Request, options: ParameterServer) -> Offer:
    """The best number of servers, by trying all (Stanza 7.2), or the one asked for; all ranks where they are beside."""
    if options.servers or options.beside:
        return _with(request, options, options.servers or request.world)
    offers = [_with(request, options, servers) for servers in range(1, max(request.world, 2))]
    return max(offers, key=lambda offer: (offer.feasible, offer.samples_per_second))


def _with(request: Request, options: ParameterServer, servers: int) -> Offer:
    beside = bool(options.beside)
    workers = request.world if beside else request.world - servers
    why = contradictions(request.pins, NAME)
    if workers < 1 or servers > request.world:
        room = f"a world of {request.world} has no room for {servers} server{'s' if servers > 1 else ''} and a worker"
        return Offer(NAME, feasible=False, why="; ".join([*why, room]))
    layers = [layer.name for layer in request.program.layers]
    examples, device = request.bounds(workers), request.cluster.device_for(workers)
    batch = largest(examples)
    roles = {"worker": tuple(range(workers))}
    serving = tuple(range(request.world - servers, request.world))
    link = request.cluster.link_across(roles["worker"], serving)
    symbols = Symbols(
        K=batch,
        P=sum(request.gradient(layer) for layer in layers),
        A=0.0,
        P_c=0.0,
        B=link.bandwidth,
        T_c=0.0,
        T_f=0.0,
        T_ps=sum(request.seconds(layer, batch, device) for layer in layers),
        itemsize=1,  # P is in bytes
    )
    if not symbols.P:
        why.append("no parameter trains, so there is nothing to serve")
    if not smallest(examples):
        why.append(f"{examples[-1]} examples cannot be shared out to {workers} workers")
    needed = {layer: request.served_memory(layer, batch) for layer in layers}
    each, have = server_memory(request, workers, servers, beside), request.memory_of(request.world)
    short_roles: tuple[str, ...] = ("worker", SERVER) if beside else ("worker",)
    short_ranks = serving if beside else roles["worker"]
    why += shortage(short_roles, short_ranks, sum(needed.values()) + each * beside, have, needed)
    if not beside and each > have:
        why.append(f"each server needs {units.nbytes(each)} of memory and has {units.nbytes(have)}")
    seconds = ps_step_seconds(symbols, workers, min(servers, workers)) + 2 * max(servers, workers) * link.latency
    return Offer(
        NAME,
        feasible=not why,
        why="; ".join(why),
        roles=roles,
        examples={"worker": examples},
        role_of=dict.fromkeys(layers, "worker"),
        step_seconds=seconds,
        most=0.0 if why or not seconds else examples[-1] / seconds,
        placements={
            layer: LayerPlacement("worker", "replicated", "parameter_server" if request.gradient_of(layer) else "none")
            for layer in layers
        },
        servers=serving,
        overlap=options.overlap is not False,
    )


def server_memory(request: Request, workers: int, servers: int, beside: bool) -> float:
    """Bytes that a server needs for its rows, besides those of a worker that it is too.

    While one bucket is summed the gradients of the next one arrive from all workers; beside a worker, those of all
    buckets.  What arrives first becomes the sum.  Small parameters are given to the workers, and their gradients
    pushed, in copies that share messages.
    """
    sizes = [h.nbytes for held in request.held.values() for h in held if h.trainable]
    whole, bucket = sum(sizes), BucketGradients.nbytes + max(sizes, default=0)
    arriving = whole if beside else min(whole, 2 * bucket)
    summed, kept = whole - arriving, request.optimizer_copies + (not beside)
    packed = sum(size for size in sizes if size < COALESCED_BELOW)
    return (kept * whole + summed + workers * arriving + packed) / servers + packed * beside
