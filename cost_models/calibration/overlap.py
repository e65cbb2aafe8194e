"""Measure how much transfers slow down computation that overlaps them.

Either matrix products run alone and while every rank sends to its neighbour; or, where ranks compute on all cores, the
processor time of an all-reduce is what it costs computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from splitc.cost_models.calibration.rank_timer import LEAST, RankTimer
from splitc.cost_models.calibration.samples import Overlap
from splitc.runtime.transport.base import Work

MESSAGES = (1 << 20, 1 << 22)  # bytes
_COMPUTE_TIMES = 2.0  # how many times as long as the transfer the overlapping computation takes


def computing(timer: RankTimer, budget: float) -> tuple[Overlap, ...]:
    """Time matrix products on every rank, alone and while it sends to the next rank and receives from the previous."""
    timer.progress("computing beside transfers")
    once = timer.seconds(range(timer.world), lambda: _products(timer, 10), budget / 10) / 10
    overlaps: list[Overlap] = []
    for nbytes in MESSAGES:
        overlaps += _beside(timer, nbytes, once, budget / len(MESSAGES))
    return tuple(overlaps)


def busy_cores(timer: RankTimer, budget: float) -> tuple[Overlap, ...]:
    """Measure the processor time of an all-reduce on every rank, which is steadier than elapsed time.

    Where ranks compute on all cores, all of it is taken from computation.
    """
    timer.progress("what transfers take from computing")
    ranks = tuple(range(timer.world))
    overlaps: list[Overlap] = []
    for nbytes in MESSAGES:
        tensor = torch.ones(nbytes // 4, device=timer.device)
        moved = 4 * (timer.world - 1) / timer.world * tensor.nbytes  # sent and received, as on a ring

        def timed(tensor: Tensor = tensor) -> tuple[float, float]:
            begin, used = time.perf_counter(), time.process_time()
            timer.transport.all_reduce(tensor, ranks).wait()
            return time.perf_counter() - begin, time.process_time() - used

        figures = timer.figures(ranks, timed, budget / len(MESSAGES))
        overlaps += [Overlap(rank, nbytes, moved, clock, clock + used) for rank, (clock, used) in enumerate(figures)]
    return tuple(overlaps)


def _to_the_next(timer: RankTimer, nbytes: int) -> Callable[[], Work]:
    """A function that starts to send `nbytes` to the next rank and to receive as many from the previous."""
    after, before = (timer.rank + 1) % timer.world, (timer.rank - 1) % timer.world
    message = torch.ones(nbytes // 4, device=timer.device)
    received = torch.empty_like(message)
    ranks = tuple(range(timer.world))
    return lambda: timer.transport.exchange([(message, after)], [(received, before)], ranks)


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
    """Products of `once` seconds each, overlapping messages of `nbytes`; nothing where that exceeds the budget."""
    ranks = tuple(range(timer.world))
    transfer = _to_the_next(timer, nbytes)
    moving = timer.seconds(ranks, lambda: transfer().wait(), budget / 5)
    times = max(1, round(_COMPUTE_TIMES * moving / once))
    if 2 * (1 + LEAST) * times * once > budget and nbytes > MESSAGES[0]:
        return []

    def both() -> tuple[float, float]:
        begin = time.perf_counter()
        work = transfer()
        seconds = _products(timer, times)
        work.wait()
        timer.settle()
        return seconds, time.perf_counter() - begin

    alone = timer.figures(ranks, lambda: (_products(timer, times),), budget / 3)
    found = []
    for rank, (together, whole) in enumerate(timer.figures(ranks, both, budget / 3)):
        moved = 2 * nbytes * min(1.0, together / whole)
        found.append(Overlap(rank, nbytes, moved, alone[rank][0], together))
    return found
