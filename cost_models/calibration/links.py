"""Time messages and collectives between ranks, and the computing time that transfers take.

What is timed is what generated programs use: a transport of `splitc.runtime`.

    message                   a sends to b, and b back: half of the round trip
    exchange                  a and b send to each other at once: is the link duplex?
    pairs                     pairs of ranks send at once, all in one direction, in turns with one pair: do they share a
                              link?
    many_to_one, one_to_many  all others send to one rank, and the reverse
    all_reduce, all_gather, reduce_scatter, all_to_all   over all ranks, over pairs, over a host

Pairs do not send back: round trips at once fall into step, so that one pair sends while another receives, and a shared
link looks like several.

Sizes grow until the time allowed is used up, so a slow link takes no longer than a fast one.  Between GPUs they go on
doubling while a run takes less than `AHEAD`: NVLink reaches its bandwidth far above what other links need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from splitc.cost_models.calibration.overlap import computing
from splitc.cost_models.calibration.rank_timer import AHEAD, Progress, RankTimer, no_progress
from splitc.cost_models.calibration.samples import (
    LIKE,
    LinkSamples,
    Ranks,
    Sample,
    best_connected,
    between_hosts,
    groups_of,
    pairs_beside_one,
)
from splitc.ir.device import COLLECTIVES
from splitc.runtime.transport.base import Transport

MESSAGES = (64, 2048, 1 << 18, 1 << 20, 1 << 22, 1 << 23)  # bytes
LARGE = MESSAGES[2:]
SUMS = (4096, 1 << 18, 1 << 20, 1 << 22, 1 << 23)  # bytes of the whole tensor of a collective
ALWAYS = 1 << 18  # bytes up to which is measured whatever it takes
MOST = 1 << 28  # bytes of the largest message between GPUs
_SAID = {"message": "messages", "exchange": "both directions at once", "pairs": "pairs at once"}
_SHARES = {"message": 0.2, "exchange": 0.05, "pairs": 0.1, "many": 0.06, "collectives": 0.37, "computing": 0.22}
_TURNS, _MOST_TURNS = 3, 9  # of one pair and several, with and without agreement
_WHOLE = 0.75  # of the time for collectives, for those of all ranks: large sums, as gradients are


def measure_links(
    transport: Transport, budget: float, progress: Progress = no_progress, ranks_per_host: int | None = None
) -> LinkSamples:
    """Time the links between the ranks of `transport`: collective, and the result is the same on every rank.

    budget: seconds, about.  ranks_per_host: where ranks of a host talk over another link than those of different hosts;
    all hosts have as many.
    """
    timer, world, per_host = RankTimer(transport, progress), transport.world, ranks_per_host or 1
    everybody = tuple(range(world))
    allowed = {what: share * budget for what, share in _SHARES.items()}
    local = _star(0, range(min(per_host, world))) if per_host > 1 else []

    samples = _messages(timer, local, per_host, allowed["message"])

    # Between the two that are connected best, and within a host: a slow link would show the other end's limits too.
    best = list(between_hosts(samples, per_host))[:1]
    samples += _timed(timer, "exchange", list(dict.fromkeys([*local[:1], *best])), LARGE, allowed["exchange"])

    # One host, and two hosts; without hosts all ranks.  One pair alone was measured as messages.
    sets = [everybody[:per_host], everybody[: 2 * per_host]] if per_host > 1 else [everybody]
    several = [ranks[: len(ranks) // 2 * 2] for ranks in dict.fromkeys(sets) if len(ranks) >= 4]
    for ranks in several:
        samples += _pairs(timer, ranks, allowed["pairs"] / len(several))

    # One rank and all ranks of other hosts; on one host all others.
    hub = best_connected(samples, per_host)
    others = [a + b - hub for a, b in _to_other_hosts(hub, world, per_host)] or [r for r in everybody if r != hub]
    if len(others) >= 2:
        for kind in ("many_to_one", "one_to_many"):
            samples += _timed(timer, kind, [(hub, *others)], LARGE, allowed["many"] / 2)

    groups = groups_of(world, per_host, samples)
    until = timer.spent + allowed["collectives"]
    for k, kind in enumerate(reversed(COLLECTIVES)):  # what the quick ones leave is for the slow ones
        left = max(0.0, until - timer.spent) / (len(COLLECTIVES) - k)
        whole = left * (_WHOLE if len(groups) > 1 else 1)
        samples += _timed(timer, kind, groups[:1], SUMS, whole) + _timed(timer, kind, groups[1:], SUMS, left - whole)
    return LinkSamples(world, tuple(samples), computing(timer, allowed["computing"]), ranks_per_host)


def _star(hub: int, others: Iterable[int]) -> list[Ranks]:
    return [(min(hub, other), max(hub, other)) for other in others if other != hub]


def _to_other_hosts(hub: int, world: int, per_host: int) -> list[Ranks]:
    """The pairs of `hub` with every rank of another host; with one rank a host these are all others."""
    return _star(hub, (rank for rank in range(world) if rank // per_host != hub // per_host))


def _messages(timer: RankTimer, local: list[Ranks], per_host: int, budget: float) -> list[Sample]:
    """Messages between rank 0 and all others; if rank 0 turns out to be slow, also between another rank and all."""
    remote = _to_other_hosts(0, timer.world, per_host)
    share = budget / (len(local) + len(remote) + 1)  # of a pair

    def timed(pairs: list[Ranks]) -> list[Sample]:
        return _timed(timer, "message", pairs, MESSAGES, share * len(pairs))

    samples = timed([*local, *remote])
    if len(remote) < 2:
        return samples
    first, *others = between_hosts(samples, per_host)
    probe = next((pair for pair in others if pair[1] // per_host != first[1] // per_host), None)
    if probe is None:
        return samples
    between = (min(first[1], probe[1]), max(first[1], probe[1]))
    samples += timed([between])
    known = between_hosts(samples, per_host)
    if LIKE * known[between] < known[first]:
        star = _to_other_hosts(between[0], timer.world, per_host)
        samples += timed([pair for pair in star if pair != between and 0 not in pair])
    return samples


def _pairs(timer: RankTimer, ranks: Ranks, budget: float) -> list[Sample]:
    """One pair, then all at once, in turns: further ones where turns differ in whether the pairs share a line.

    What else the machine does slows both down then, while messages were timed long before.
    """
    found: list[Sample] = []
    for turn in range(1, _MOST_TURNS + 1):
        found += _timed(timer, "pairs", [ranks[:: len(ranks) // 2], ranks], LARGE, budget / _TURNS)
        least = (len(ranks) // 2) ** 0.5
        if turn >= _TURNS and len({times > least for of in pairs_beside_one(found).values() for times in of}) == 1:
            break
    return found


def _timed(timer: RankTimer, kind: str, groups: Sequence[Ranks], sizes: Sequence[int], budget: float) -> list[Sample]:
    """Samples of one kind over each of `groups`, which have equal parts of the budget."""
    samples = []
    timer.transport.connect(tuple(sorted(ranks)) for ranks in groups if kind not in ("message", "pairs"))
    for ranks in groups:
        over = f"between ranks {ranks[0]} and {ranks[1]}" if len(ranks) == 2 else f"over {len(ranks)} ranks"
        timer.progress(f"{_SAID.get(kind, kind.replace('_', ' '))} {over}")
        times = 2 if kind == "message" else 1  # it goes there and back
        samples += growing(timer, kind, ranks, sizes, _operation(timer, kind, ranks), budget / len(groups), times)
    return samples


def _operation(timer: RankTimer, kind: str, ranks: Ranks) -> Callable[[Tensor], None]:
    """This rank's part in what `ranks` do with a tensor; the first of them is the hub of one to many."""
    transport, n = timer.transport, len(ranks)
    if timer.rank not in ranks:
        return lambda tensor: None
    place, (hub, *others) = ranks.index(timer.rank), ranks
    partner = ranks[(place + n // 2) % n]  # in the other half
    is_hub, everybody = timer.rank == hub, tuple(sorted(ranks))
    peers = others if is_hub else [hub]

    def pieces_of(tensor: Tensor) -> tuple[list[Tensor], Tensor]:
        """One of n equal pieces for each rank, and a buffer as large as one."""
        pieces = list(tensor[: tensor.numel() // n * n].chunk(n))
        return pieces, timer.buffers(pieces[0].numel(), 1)[0]

    def run(tensor: Tensor) -> None:
        match kind:
            case "pairs":
                (transport.isend if place < n // 2 else transport.irecv)(tensor, partner).wait()
            case "message" if place < n // 2:
                transport.isend(tensor, partner).wait()
                transport.irecv(tensor, partner).wait()
            case "message":
                transport.irecv(tensor, partner).wait()
                transport.isend(tensor, partner).wait()
            case "exchange":
                (received,) = timer.buffers(tensor.numel(), 1)
                transport.exchange([(tensor, partner)], [(received, partner)], ranks).wait()
            case "many_to_one" | "one_to_many" if is_hub == (kind == "one_to_many"):
                transport.exchange([(tensor, peer) for peer in peers], [], everybody).wait()
            case "many_to_one" | "one_to_many":
                messages = list(zip(timer.buffers(tensor.numel(), len(peers)), peers, strict=True))
                transport.exchange([], messages, everybody).wait()
            case "all_reduce":
                transport.all_reduce(tensor, ranks).wait()
            case "all_gather":
                transport.all_gather(*pieces_of(tensor), ranks).wait()
            case "reduce_scatter":
                pieces, output = pieces_of(tensor)
                transport.reduce_scatter(output, pieces, ranks).wait()
            case "all_to_all":
                numel = max(1, tensor.numel() // n**2)
                parts = zip(tensor[: n * numel].split(numel), timer.buffers(numel, n), ranks, strict=True)
                others = [each for each in parts if each[2] != timer.rank]
                sends, receives = [(a, peer) for a, _, peer in others], [(b, peer) for _, b, peer in others]
                transport.exchange(sends, receives, ranks).wait()

    return run


def growing(
    timer: RankTimer,
    kind: str,
    ranks: Ranks,
    sizes: Sequence[int],
    run: Callable[[Tensor], object],
    budget: float,
    times: int = 1,
) -> list[Sample]:
    """Samples of `run`, which does it `times` times, on tensors of as many of `sizes` bytes as the budget allows."""
    found: list[Sample] = []
    begin = timer.spent
    if timer.rank in ranks:
        run(torch.ones(16 * len(ranks), device=timer.device))  # connects them
        timer.settle()
    pending = list(sizes)
    while pending:
        nbytes = pending.pop(0)
        left = budget - (timer.spent - begin)
        if found and nbytes > ALWAYS:
            expected = times * _expected(found, nbytes)
            if 2 * expected > left:
                break
        tensor = torch.ones(nbytes // 4, device=timer.device)
        seconds = timer.seconds(ranks, partial(run, tensor), left / (2 * (len(pending) + 1)))
        found.append(Sample(kind, ranks, nbytes, seconds / times))
        if not pending and timer.ahead and seconds < AHEAD and 2 * nbytes <= MOST:
            pending.append(2 * nbytes)
    return found


def _expected(found: Sequence[Sample], nbytes: float) -> float:
    """Seconds that a larger size takes: by its bytes, where more than one is known along the line through the last two.

    Twice as long as both is what a size takes at most that was only latency before.
    """
    *_, before, last = (None, *found)
    by_bytes = last.seconds * nbytes / last.nbytes
    if before is None:
        return by_bytes
    slope = max(0.0, (last.seconds - before.seconds) / (last.nbytes - before.nbytes))
    return min(by_bytes, 2 * (last.seconds + slope * (nbytes - last.nbytes)))
