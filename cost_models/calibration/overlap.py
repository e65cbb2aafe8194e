"""Measure how much transfers slow down computation that overlaps them, and how much equal computations differ.

Matrix products are timed alone, one after the other, and beside all-reduces.
Where ranks compute on all cores they have, this is more than the processor time of an all-reduce alone: both wait for
the cores, and caches serve both.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from splitc.cost_models.calibration.rank_timer import LEAST, RankTimer
from splitc.cost_models.calibration.samples import Overlap

MESSAGES = (1 << 16, 1 << 20, 1 << 21)  # bytes; of the first its messages cost the time
_PIECE, _LEAST_PIECES, _MOST_PIECES = 0.04, 5, 50  # seconds of products whose spread is measured, and how many
_STEADY = 1e-5  # seconds of jitter: a second of computing takes 3 ms more or less
_COMPUTE_TIMES = 1.5  # how many times as long as the transfer the overlapping computation takes


def computing(timer: RankTimer, budget: float) -> tuple[Overlap, ...]:
    """Time matrix products on every rank, alone and while all ranks sum a tensor."""
    timer.progress("computing beside transfers")
    once = timer.seconds(range(timer.world), lambda: _products(timer, 10), budget / 10) / 10
    found, end = list[Overlap](), timer.spent + budget
    for left, nbytes in zip((3, 2, 1), MESSAGES, strict=True):
        found += _beside(timer, nbytes, once, (end - timer.spent) / left)
    return tuple(found)


def _products(timer: RankTimer, times: int) -> float:
    """Seconds of `times` matrix products."""
    edge = 2048 if timer.device.type == "cuda" else 192
    a = torch.ones(edge, edge, device=timer.device)
    product = torch.empty_like(a)
    begin = time.perf_counter()
    for _ in range(times):
        torch.mm(a, a, out=product)
    if timer.device.type == "cuda":  # not the streams of the transfers
        torch.cuda.current_stream(timer.device).synchronize()
    return time.perf_counter() - begin


def _beside(timer: RankTimer, nbytes: int, once: float, budget: float) -> list[Overlap]:
    """Products of `once` seconds each, overlapping a sum of `nbytes`; nothing where that exceeds the budget."""
    ranks = tuple(range(timer.world))
    summed = torch.ones(nbytes // 4, device=timer.device)
    moving = timer.seconds(ranks, lambda: timer.transport.all_reduce(summed, ranks).wait(), budget / 5)
    times = max(1, round(_COMPUTE_TIMES * moving / once))
    if 2 * (1 + LEAST) * times * once > budget and nbytes > MESSAGES[1]:
        return []

    def both() -> tuple[float, float]:
        begin = time.perf_counter()
        work = timer.transport.all_reduce(summed, ranks)
        seconds = _products(timer, times)
        work.wait()
        timer.settle()
        return seconds, time.perf_counter() - begin

    alone = timer.figures(ranks, lambda: (_products(timer, times),), budget / 3)
    found = []
    for rank, (together, whole) in enumerate(timer.figures(ranks, both, budget / 3)):
        messages = 4 * (timer.world - 1) * min(1.0, together / whole)  # both ways, as on a ring
        found.append(Overlap(rank, nbytes, messages * nbytes / timer.world, alone[rank][0], together, messages))
    return found


def measure_jitter(timer: RankTimer, budget: float) -> float:
    """The variance of the time of matrix products for each second of it, while all ranks compute (s).

    Of pieces that follow each other, so that what changes slowly is none of it; 0 where it is too small to matter.
    """
    timer.progress("the spread of computing")
    ranks = range(timer.world)
    once = timer.seconds(ranks, lambda: _products(timer, 10), budget / 10) / 10
    times = max(1, round(_PIECE / once))
    number = min(_MOST_PIECES, max(_LEAST_PIECES, int(budget / (times * once))))

    def spread() -> tuple[float, float]:
        pieces = [_products(timer, times) for _ in range(number)]
        return sum((b - a) ** 2 for a, b in pairwise(pieces)) / (2 * (number - 1)), sum(pieces) / number

    found = timer.figures(ranks, spread, 0.0)
    jitter = sum(variance for variance, _ in found) / sum(mean for _, mean in found)
    return jitter if jitter > _STEADY else 0.0
