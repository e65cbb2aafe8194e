"""Measure every pair of ranks: in rounds of pairs that have no rank in common, then the slowest again, one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from splitc.runtime.transport.base import Transport

_FIRST, _LARGEST = 1 << 16, 1 << 26  # bytes
_TRIPS = 3  # of each size
_SECONDS = 1.0  # of a pair, where there is time
_IN_ROUNDS = 0.6  # of the budget


@dataclass(frozen=True)
class Pair:
    """What two ranks showed.

    bandwidth: bytes/s of one direction, their mean.  latency: of a message (s).  ahead: of the first rank's clock is
    the second's (s).  beside: the bandwidth while other pairs were measured, where that is known.
    """

    ranks: tuple[int, int]
    bandwidth: float
    latency: float
    ahead: float
    beside: float | None = None


def rounds(world: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ranks, those of a round disjoint, as a tournament is played."""
    seats = [*range(world), *[-1] * (world % 2)]
    for _ in seats[1:]:
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure_pairs(transport: Transport, budget: float) -> list[Pair]:
    """Every pair; collective, and the same on every rank.  budget: seconds, about."""
    turns = list(rounds(transport.world))
    seconds = min(_SECONDS, _IN_ROUNDS * budget / max(1, len(turns)))
    found = {each.ranks: each for turn in turns for each in _at_once(transport, turn, seconds)}
    left = int((budget - seconds * len(turns)) / seconds) if any(len(turn) > 1 for turn in turns) else 0
    for slow in sorted(found.values(), key=lambda each: each.bandwidth)[:left]:
        (alone,) = _at_once(transport, [slow.ranks], seconds)
        found[slow.ranks] = replace(alone, beside=slow.bandwidth)
    return [found[ranks] for ranks in sorted(found)]


def _at_once(transport: Transport, pairs: Sequence[tuple[int, int]], seconds: float) -> list[Pair]:
    own = next((pair for pair in pairs if transport.rank in pair), None)
    if own is not None and own[1] == transport.rank:
        _follow(transport, own[0])
    shown = _lead(transport, own, seconds) if own is not None and own[0] == transport.rank else None
    return [each for each in transport.all_gather_objects(shown) if each is not None]


def _lead(transport: Transport, ranks: tuple[int, int], seconds: float) -> Pair:
    end = time.monotonic() + seconds

    def trips(nbytes: int, times: int) -> list[tuple[float, float]]:
        """Seconds there and back, and how much the other's clock is ahead of this one."""
        _move(transport, torch.tensor([nbytes, times], device=transport.device), ranks[1], True)
        tensor, found = _buffer(transport, nbytes), []
        for _ in range(times):
            told, begin = time.time(), time.perf_counter()
            _move(transport, tensor, ranks[1], True)
            _move(transport, tensor, ranks[1], False)
            took = time.perf_counter() - begin
            found.append((took, float(tensor[0]) - told - took / 2))
        return found

    trips(8, _TRIPS)
    shortest, ahead = min(trips(8, 20))
    nbytes, known = _FIRST, [(8, shortest)]
    while True:
        took = statistics.median(seconds for seconds, _ in trips(nbytes, _TRIPS))
        known.append((nbytes, took))
        if nbytes >= _LARGEST or time.monotonic() + 4 * _TRIPS * took > end:
            break
        nbytes *= 4
    trips(8, 0)
    (small, quick), (large, slow) = known[-2:]  # what a token bucket lets through at once is in both
    bandwidth = 2 * (large - small) / (slow - quick) if slow > quick else 2 * large / slow
    return Pair(ranks, bandwidth, shortest / 2, ahead)


def _follow(transport: Transport, peer: int) -> None:
    order = torch.zeros(2, dtype=torch.int64, device=transport.device)
    while True:
        _move(transport, order, peer, False)
        nbytes, times = order.tolist()
        if not times:
            return
        tensor = _buffer(transport, nbytes)
        for _ in range(times):
            _move(transport, tensor, peer, False)
            tensor[0] = time.time()
            _move(transport, tensor, peer, True)


def _buffer(transport: Transport, nbytes: int) -> Tensor:
    return torch.zeros(nbytes // 8, dtype=torch.float64, device=transport.device)


def _move(transport: Transport, tensor: Tensor, peer: int, sends: bool) -> None:
    (transport.isend if sends else transport.irecv)(tensor, peer).wait()
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)
