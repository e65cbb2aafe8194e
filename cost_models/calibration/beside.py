"""Time what transfers take from computing that goes on beside them.

Either matrix products run alone and while every rank sends to its neighbour; or, where a rank has no core to spare, the
processor time of an all-reduce is what it takes from computing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from splitc.cost_models.calibration.bench import LEAST, Bench
from splitc.cost_models.calibration.samples import Overlap
from splitc.runtime.transport.base import Work

BESIDE = (1 << 20, 1 << 22)  # bytes of messages beside computing
_BESIDE = 2.0  # the computing beside a transfer takes so many times as long as it


def computing(bench: Bench, budget: float) -> tuple[Overlap, ...]:
    """Every rank computes, alone and while it sends to the next rank and receives from the one before."""
    bench.say("computing beside transfers")
    once = bench.seconds(range(bench.world), lambda: _products(bench, 10), budget / 10) / 10
    overlaps: list[Overlap] = []
    for nbytes in BESIDE:
        overlaps += _beside(bench, nbytes, once, budget / len(BESIDE))
    return tuple(overlaps)


def busy_cores(bench: Bench, budget: float) -> tuple[Overlap, ...]:
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
