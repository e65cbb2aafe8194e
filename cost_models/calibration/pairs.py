"""Measure every pair of ranks: in rounds of pairs that have no rank in common, then the slowest again, one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from splitc.cost_models.calibration.rank_timer import LEAST, RankTimer
from splitc.runtime.transport.base import Transport

_FIRST, _LARGEST = 1 << 16, 1 << 26  # bytes
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
    timer, turns = RankTimer(transport), list(rounds(transport.world))
    seconds = min(_SECONDS, _IN_ROUNDS * budget / max(1, len(turns)))
    found = {each.ranks: each for turn in turns for each in _at_once(timer, turn, seconds)}
    left = int((budget - seconds * len(turns)) / seconds) if any(len(turn) > 1 for turn in turns) else 0
    for slow in sorted(found.values(), key=lambda each: each.bandwidth)[:left]:
        (alone,) = _at_once(timer, [slow.ranks], seconds)
        found[slow.ranks] = replace(alone, beside=slow.bandwidth)
    return [found[ranks] for ranks in sorted(found)]


def _at_once(timer: RankTimer, pairs: Sequence[tuple[int, int]], seconds: float) -> list[Pair]:
    """Disjoint pairs, all with messages of the same sizes: as large as the slowest has time for."""
    begin, sizes = timer.spent, [8, _FIRST]
    own: list[tuple[float, float]] = []  # the trips of this rank
    shown: list[list[tuple[float, ...]]] = []  # for each size, of each rank the figures of a trip

    def trip(tensor: Tensor) -> tuple[float, float]:
        own.append(_trip(timer, pairs, tensor))
        return own[-1]

    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 8, dtype=torch.float64, device=timer.device)
        shown.append(timer.figures(range(timer.world), partial(trip, tensor), seconds / 20))
        expected = 4 * (1 + LEAST) * max(took for took, _ in shown[-1])
        if nbytes == sizes[-1] < _LARGEST and timer.spent - begin + expected < seconds:
            sizes.append(4 * nbytes)
    quickest = timer.transport.all_gather_objects(min(own))  # a busy machine only slows others down
    found = []
    for pair in pairs:
        quick, slow = (figures[pair[0]][0] for figures in shown[-2:])  # both with what a token bucket lets through
        bandwidth = 2 * (sizes[-1] - sizes[-2]) / (slow - quick) if slow > quick else 2 * sizes[-1] / slow
        took, ahead = quickest[pair[0]]
        found.append(Pair(pair, bandwidth, took / 2, ahead))
    return found


def _trip(timer: RankTimer, pairs: Sequence[tuple[int, int]], tensor: Tensor) -> tuple[float, float]:
    """Seconds there and back, and how much the other's clock is ahead: of the first rank of each pair."""
    peer = next((a + b - timer.rank for a, b in pairs if timer.rank in (a, b)), timer.rank)
    told, begin = time.time(), time.perf_counter()
    if peer > timer.rank:
        timer.transport.isend(tensor, peer).wait()
        timer.transport.irecv(tensor, peer).wait()
    elif peer < timer.rank:
        timer.transport.irecv(tensor, peer).wait()
        tensor[0] = time.time()
        timer.transport.isend(tensor, peer).wait()
    timer.settle()
    took = time.perf_counter() - begin
    return took, float(tensor[0]) - told - took / 2
