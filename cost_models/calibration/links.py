"""Time messages and collectives between ranks, and what they take from computing.

What is timed is what generated programs use: a transport of `splitc.runtime`.

    message                   a sends to b, and b back: half of the round trip
    exchange                  a and b send to each other at once: is the link duplex?
    pairs                     pairs of ranks send messages at once: do they share a link?
    many_to_one, one_to_many  all others send to one rank, and the reverse
    all_reduce, all_gather, reduce_scatter   over all ranks, over pairs, over a host
    computing                 matrix products alone, and while every rank sends to its neighbour

Sizes grow until the time allowed is used up, so a slow link takes no longer than a fast one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from splitc.cost_models.calibration.bench import LEAST, Bench, Progress, quiet
from splitc.cost_models.calibration.samples import (
    LIKE,
    LinkSamples,
    Overlap,
    Ranks,
    Sample,
    best_connected,
    between_hosts,
    groups_of,
)
from splitc.ir.cluster import COLLECTIVES
from splitc.runtime.transport.base import Transport, Work

MESSAGES = (64, 2048, 1 << 18, 1 << 20, 1 << 22, 1 << 23)  # bytes
LARGE = MESSAGES[2:]
SUMS = (4096, 1 << 18, 1 << 20, 1 << 22, 1 << 23)  # bytes of the whole tensor of a collective
BESIDE = (1 << 20, 1 << 22)  # bytes of messages beside computing
ALWAYS = 1 << 18  # bytes up to which is measured whatever it takes
_SHARES = {"message": 0.35, "exchange": 0.08, "pairs": 0.05, "many": 0.12, "collectives": 0.28, "computing": 0.12}
_BESIDE = 2.0  # the computing beside a transfer takes so many times as long as it


def measure_links(
    transport: Transport,
    budget: float,
    progress: Progress = quiet,
    ranks_per_host: int | None = None,
    one_core: bool = False,
) -> LinkSamples:
    """Time the links between the ranks of `transport`: collective, and the result is the same on every rank.

    budget: seconds, about.  ranks_per_host: where ranks of a host talk over another link than those of different hosts;
    all hosts have as many.  one_core: every rank has no more cores than it computes on, so that transfers take theirs.
    """
    bench = Bench(transport, progress)
    hosts = _Hosts(transport.world, ranks_per_host or 1)
    samples = _messages(bench, hosts, budget * _SHARES["message"])
    hub = best_connected(samples, hosts.per_host)
    samples += _exchanges(bench, hosts, samples, budget * _SHARES["exchange"])
    samples += _pairs_at_once(bench, hosts, budget * _SHARES["pairs"])
    samples += _many(bench, hosts, hub, budget * _SHARES["many"])
    samples += _collectives(bench, hosts, samples, budget * _SHARES["collectives"])
    measure = taken if one_core else computing
    overlaps = measure(bench, budget * _SHARES["computing"])
    return LinkSamples(transport.world, tuple(samples), overlaps, ranks_per_host)


class _Hosts:
    """Which ranks talk within a host, and which between hosts.  With one rank a host, all talk between hosts."""

    def __init__(self, world: int, per_host: int) -> None:
        self.world, self.per_host = world, per_host
        self.everybody = tuple(range(world))
        self.local = _star(0, range(min(per_host, world))) if per_host > 1 else []
        self.remote = self.star(0)

    def star(self, hub: int) -> list[Ranks]:
        """The pairs of `hub` with every rank of another host."""
        return _star(hub, (rank for rank in self.everybody if rank // self.per_host != hub // self.per_host))


def _star(hub: int, others: Iterable[int]) -> list[Ranks]:
    return [(min(hub, other), max(hub, other)) for other in others if other != hub]


def _messages(bench: Bench, hosts: _Hosts, budget: float) -> list[Sample]:
    """Messages between rank 0 and all others; when rank 0 turns out to be the slow one, between another and all."""
    pairs = [*hosts.local, *hosts.remote]
    share = budget / (len(pairs) + 1)
    samples = [each for pair in pairs for each in _messages_of(bench, pair, share)]
    if len(hosts.remote) < 2:
        return samples
    known = between_hosts(samples, hosts.per_host)
    first, *others = known
    probe = next((pair for pair in others if pair[1] // hosts.per_host != first[1] // hosts.per_host), None)
    if probe is None:
        return samples
    between = (min(first[1], probe[1]), max(first[1], probe[1]))
    samples += _messages_of(bench, between, share)
    known = between_hosts(samples, hosts.per_host)
    if LIKE * known[between] < known[first]:
        more = [pair for pair in hosts.star(between[0]) if pair != between and 0 not in pair]
        samples += [each for pair in more for each in _messages_of(bench, pair, share)]
    return samples


# -- what is timed -----------------------------------------------------------------------------------------------------


def _messages_of(bench: Bench, pair: Ranks, budget: float) -> list[Sample]:
    bench.say(f"messages between ranks {pair[0]} and {pair[1]}")

    def there_and_back(message: Tensor) -> None:
        if bench.rank == pair[0]:
            bench.transport.isend(message, pair[1]).wait()
            bench.transport.irecv(message, pair[1]).wait()
        else:
            bench.transport.irecv(message, pair[0]).wait()
            bench.transport.isend(message, pair[0]).wait()

    return growing(bench, "message", pair, MESSAGES, there_and_back, budget, times=2)


def _exchanges(bench: Bench, hosts: _Hosts, messages: Sequence[Sample], budget: float) -> list[Sample]:
    """Between the two that are connected best, and within a host: of a slow link it would show the other end's too."""
    pairs = [*hosts.local[:1], *list(between_hosts(messages, hosts.per_host))[:1]]
    pairs = list(dict.fromkeys(pairs))
    samples: list[Sample] = []
    for pair in pairs:
        bench.say(f"both directions at once between ranks {pair[0]} and {pair[1]}")

        def both_ways(message: Tensor, pair: Ranks = pair) -> None:
            other = pair[0] + pair[1] - bench.rank
            received = bench.buffers(message.numel(), 1)
            bench.transport.exchange([(message, other)], [(received[0], other)], pair).wait()

        samples += growing(bench, "exchange", pair, LARGE, both_ways, budget / len(pairs))
    return samples


def _pairs_at_once(bench: Bench, hosts: _Hosts, budget: float) -> list[Sample]:
    """Ranks in two halves: each of the first sends to its partner in the second.

    Between hosts these are the ranks of two hosts.  One pair alone was measured as messages.
    """
    sets = []
    if hosts.per_host > 1:
        sets.append(hosts.everybody[: min(hosts.per_host, hosts.world)])
    if hosts.remote:
        sets.append(hosts.everybody[: 2 * hosts.per_host] if hosts.per_host > 1 else hosts.everybody)
    samples = []
    for ranks in sets:
        half = len(ranks) // 2
        if half < 2:
            continue
        bench.say(f"{half} pairs at once")
        members = ranks[: 2 * half]

        def there_and_back(message: Tensor, half: int = half, members: Ranks = members) -> None:
            place = members.index(bench.rank)
            if place < half:
                bench.transport.isend(message, members[place + half]).wait()
                bench.transport.irecv(message, members[place + half]).wait()
            else:
                bench.transport.irecv(message, members[place - half]).wait()
                bench.transport.isend(message, members[place - half]).wait()

        samples += growing(bench, "pairs", members, LARGE, there_and_back, budget / len(sets), times=2)
    return samples


def _many(bench: Bench, hosts: _Hosts, hub: int, budget: float) -> list[Sample]:
    """All ranks of other hosts and the hub; on one host all others and the hub."""
    others = [pair[0] + pair[1] - hub for pair in hosts.star(hub)] or [r for r in hosts.everybody if r != hub]
    if len(others) < 2:
        return []
    members = (hub, *others)
    everybody = tuple(sorted(members))
    samples = []
    for kind in ("many_to_one", "one_to_many"):
        bench.say(kind.replace("_", " "))

        def run(message: Tensor, kind: str = kind) -> None:
            if bench.rank != hub:
                mine = [(message, hub)]
                sends, receives = (mine, []) if kind == "many_to_one" else ([], mine)
            elif kind == "many_to_one":
                sends, receives = [], list(zip(bench.buffers(message.numel(), len(others)), others, strict=True))
            else:
                sends, receives = [(message, other) for other in others], []
            bench.transport.exchange(sends, receives, everybody).wait()

        samples += growing(bench, kind, members, LARGE, run, budget / 2)
    return samples


def _collectives(bench: Bench, hosts: _Hosts, messages: Sequence[Sample], budget: float) -> list[Sample]:
    groups = groups_of(hosts.world, hosts.per_host, messages)
    bench.transport.connect(groups)
    samples = []
    for kind in COLLECTIVES:
        for ranks in groups:
            bench.say(f"{kind} over {len(ranks)} ranks")
            share = budget / (len(COLLECTIVES) * len(groups))
            samples += growing(bench, kind, ranks, SUMS, _collective(bench, kind, ranks), share)
    return samples


def _collective(bench: Bench, kind: str, ranks: Ranks) -> Callable[[Tensor], None]:
    transport, n = bench.transport, len(ranks)

    def all_reduce(tensor: Tensor) -> None:
        transport.all_reduce(tensor, ranks).wait()

    def all_gather(tensor: Tensor) -> None:
        outputs = list(tensor[: tensor.numel() // n * n].chunk(n))
        transport.all_gather(outputs, bench.buffers(outputs[0].numel(), 1)[0], ranks).wait()

    def reduce_scatter(tensor: Tensor) -> None:
        pieces = tensor[: tensor.numel() // n * n].chunk(n)
        transport.reduce_scatter(bench.buffers(pieces[0].numel(), 1)[0], pieces, ranks).wait()

    return {"all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}[kind]


def computing(bench: Bench, budget: float) -> tuple[Overlap, ...]:
    """Every rank computes, alone and while it sends to the next rank and receives from the one before."""
    bench.say("computing beside transfers")
    once = bench.seconds(range(bench.world), lambda: _products(bench, 10), budget / 10) / 10
    overlaps: list[Overlap] = []
    for nbytes in BESIDE:
        overlaps += _beside(bench, nbytes, once, budget / len(BESIDE))
    return tuple(overlaps)


def taken(bench: Bench, budget: float) -> tuple[Overlap, ...]:
    """Every rank takes part in an all-reduce, and its processor time is what that takes.

    It is all taken from computing where a rank has no core to spare; and it is steadier than the clock.
    """
    bench.say("what transfers take from computing")
    ranks = tuple(range(bench.world))
    overlaps: list[Overlap] = []
    for nbytes in BESIDE:
        tensor = torch.ones(nbytes // 4, device=bench.device)
        moved = 4 * (bench.world - 1) / bench.world * tensor.nbytes  # sent and received, as on a ring

        def timed(tensor: Tensor = tensor) -> tuple[float, float]:
            begin, used = time.perf_counter(), time.process_time()
            bench.transport.all_reduce(tensor, ranks).wait()
            return time.perf_counter() - begin, time.process_time() - used

        figures = bench.figures(ranks, timed, budget / len(BESIDE))
        overlaps += [Overlap(rank, nbytes, moved, clock, clock + used) for rank, (clock, used) in enumerate(figures)]
    return tuple(overlaps)


def _to_the_next(bench: Bench, nbytes: int) -> Callable[[], Work]:
    """Starts to send so much to the next rank, and to receive it from the one before."""
    after, before = (bench.rank + 1) % bench.world, (bench.rank - 1) % bench.world
    message = torch.ones(nbytes // 4, device=bench.device)
    received = torch.empty_like(message)
    ranks = tuple(range(bench.world))
    return lambda: bench.transport.exchange([(message, after)], [(received, before)], ranks)


def _products(bench: Bench, times: int) -> float:
    """Seconds of matrix products."""
    edge = 2048 if bench.device.type == "cuda" else 192
    a = torch.ones(edge, edge, device=bench.device)
    product = torch.empty_like(a)
    begin = time.perf_counter()
    for _ in range(times):
        torch.mm(a, a, out=product)
    if bench.device.type == "cuda":  # not the streams of the transfers
        torch.cuda.current_stream(bench.device).synchronize()
    return time.perf_counter() - begin


def _beside(bench: Bench, nbytes: int, once: float, budget: float) -> list[Overlap]:
    """Products that take `once` each, beside messages of `nbytes`; none where that would take too long."""
    ranks = tuple(range(bench.world))
    transfer = _to_the_next(bench, nbytes)
    moving = bench.seconds(ranks, lambda: transfer().wait(), budget / 5)
    times = max(1, round(_BESIDE * moving / once))
    if 2 * (1 + LEAST) * times * once > budget and nbytes > BESIDE[0]:
        return []

    def both() -> tuple[float, float]:
        begin = time.perf_counter()
        work = transfer()
        seconds = _products(bench, times)
        work.wait()
        bench.settle()
        return seconds, time.perf_counter() - begin

    alone = bench.figures(ranks, lambda: (_products(bench, times),), budget / 3)
    found = []
    for rank, (together, whole) in enumerate(bench.figures(ranks, both, budget / 3)):
        moved = 2 * nbytes * min(1.0, together / whole)
        found.append(Overlap(rank, nbytes, moved, alone[rank][0], together))
    return found


def growing(
    bench: Bench,
    kind: str,
    ranks: Ranks,
    sizes: Sequence[int],
    run: Callable[[Tensor], object],
    budget: float,
    times: int = 1,
) -> list[Sample]:
    """Samples of `run`, which does it `times` times, on tensors of as many of `sizes` bytes as the budget allows."""
    found: list[Sample] = []
    begin = bench.spent
    if bench.rank in ranks:
        run(torch.ones(16 * len(ranks), device=bench.device))  # connects them
    for k, nbytes in enumerate(sizes):
        left = budget - (bench.spent - begin)
        if found and nbytes > ALWAYS:
            expected = times * found[-1].seconds * nbytes / found[-1].nbytes
            if (1 + LEAST) * expected > left:
                break
        tensor = torch.ones(nbytes // 4, device=bench.device)
        seconds = bench.seconds(ranks, partial(run, tensor), left / (len(sizes) - k))
        found.append(Sample(kind, ranks, nbytes, seconds / times))
    return found
