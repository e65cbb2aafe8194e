"""Measure a device: time microbenchmarks, count their ops as those of a model, and fit the rates.

The microbenchmarks run in rounds, so that each finds the caches as in a model: its input was just written, its weights
were not read for long.  The median of its runs is used.  On a CPU with one thread, as torchrun gives each rank, the
thread's own time is measured, which other processes hardly change.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from splitc.cost_models.calibration.device_fit import Rates, Sample, fit_rates, fitted
from splitc.cost_models.calibration.microbenchmarks import Microbenchmark, microbenchmarks, products
from splitc.cost_models.compute.clocks import clock_of, seeded
from splitc.cost_models.compute.counting import OpCounter, merged
from splitc.ir.costs import OpCost
from splitc.ir.device import Device
from splitc.runtime.clocks import Clock

_LEAST, _MOST = 3, 25  # rounds
_OTHER_DTYPES = (torch.float64, torch.bfloat16, torch.float16)
_OTHERS = 0.15  # of the budget, for the other dtypes


@dataclass(frozen=True)
class Residual:
    """Measured seconds of one operation beside those that the fitted numbers predict."""

    what: str
    measured: float
    fitted: float


def averaged(residuals: Iterable[Residual]) -> tuple[Residual, ...]:
    """One residual for each operation: the mean where it was timed on several ranks."""
    found: dict[str, list[Residual]] = defaultdict(list)
    for each in residuals:
        found[each.what].append(each)
    return tuple(
        Residual(what, statistics.fmean(r.measured for r in rows), statistics.fmean(r.fitted for r in rows))
        for what, rows in found.items()
    )


@dataclass(frozen=True)
class DeviceFit:
    """A device, and the residuals of its fit."""

    device: Device
    residuals: tuple[Residual, ...]


def measure_device(where: torch.device, budget: float, progress: Callable[[str], None]) -> DeviceFit:
    """Measure the device at `where`, with as many threads as torch uses in this process.

    budget: seconds, about; every microbenchmark runs a few times however long that takes.
    """
    with seeded(where):
        samples = time_microbenchmarks(microbenchmarks(where), where, (1 - _OTHERS) * budget, progress)
        rates = fit_rates(samples)
        progress("matrix products in other dtypes")
        others = _other_dtypes(where, rates, _OTHERS * budget)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else cpu_model()
    device = rates.device(name, _memory(where), others, tf32(where))
    return DeviceFit(device, tuple(Residual(each.what, each.seconds, fitted(each, device)) for each in samples))


def time_microbenchmarks(
    spread: Sequence[Microbenchmark], where: torch.device, budget: float, progress: Callable[[str], None]
) -> list[Sample]:
    """A sample of each microbenchmark's forward, and of its backward where it has one."""
    progress(f"counting {len(spread)} microbenchmarks")
    ops = [_counted(each) for each in spread]
    timers = [_Timer(clock_of(where)) for _ in spread]
    end = time.monotonic() + budget
    for rounds in range(1, _MOST + 1):
        progress(f"microbenchmarks, round {rounds}")
        begin = time.monotonic()
        for each, timer in zip(spread, timers, strict=True):
            _run(each, timer)
        now = time.monotonic()
        if rounds >= _LEAST and now + (now - begin) > end:
            break
    return [
        Sample(f"{each.what}{', backward' if backward else ''}", counted[backward], timer.median(backward))
        for each, counted, timer in zip(spread, ops, timers, strict=True)
        for backward in (False, True)
        if counted[backward]
    ]


def _run(microbenchmark: Microbenchmark, watch: Callable[[bool], AbstractContextManager[object]]) -> None:
    """Run the forward within `watch(False)`, and the backward, if there is one, within `watch(True)`."""
    given = microbenchmark.given
    if given.is_floating_point():  # freshly written, as what a model's op reads
        given = given.detach().clone().requires_grad_(given.requires_grad)
    with watch(False):
        out = microbenchmark.run(given)
    if out.requires_grad:
        gradient = torch.ones_like(out)
        with watch(True):
            out.backward(gradient)
    for parameter in microbenchmark.parameters:
        parameter.grad = None


def _counted(microbenchmark: Microbenchmark) -> tuple[tuple[OpCost, ...], tuple[OpCost, ...]]:
    """The ops of an microbenchmark's forward and of its backward; the run warms up too."""
    ops: list[OpCost] = []
    _run(microbenchmark, lambda backward: OpCounter(ops.append, backward))
    forward, backward = ([op for op in ops if op.backward == back] for back in (False, True))
    return merged(forward), merged(backward)


def _other_dtypes(where: torch.device, rates: Rates, budget: float) -> dict[str, float]:
    """dtype -> FLOP/s of the largest matrix product that fits the budget; without dtypes that cannot multiply."""
    found = {}
    for dtype in _OTHER_DTYPES:
        end = time.monotonic() + budget / len(_OTHER_DTYPES)
        with suppress(RuntimeError):  # "not implemented for 'Half'"
            for each in products(where, dtype):
                (op,), _ = _counted(each)
                timer = _Timer(clock_of(where))
                for _ in range(_LEAST):
                    _run(each, timer)
                moving = op.bytes_accessed / rates.bandwidths["matmul_moved"] + rates.launch
                taken = timer.median(False)
                found[str(dtype).removeprefix("torch.")] = op.flops / max(taken - moving, taken / 2)
                if time.monotonic() + 8 * _LEAST * taken > end:
                    break
    return found


class _Timer:
    """Collects seconds of forwards and of backwards: `with timer(backward): ...`."""

    def __init__(self, clock: Clock) -> None:
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
        self._clock, self._backward = clock, False
        self._begin: Any = None

    def __call__(self, backward: bool) -> _Timer:
        self._backward = backward
        return self

    def __enter__(self) -> None:
        self._clock.settle()
        self._begin = self._clock.now()

    def __exit__(self, *_: object) -> None:
        end = self._clock.now()
        self._clock.settle()
        self._seconds[self._backward].append(self._clock.between(self._begin, end))

    def median(self, backward: bool) -> float:
        return statistics.median(self._seconds[backward])


def tf32(where: torch.device) -> bool:
    """Whether convolutions in float32 compute in TF32 there: from Ampere on, unless this process has turned it off."""
    cudnn: Any = torch.backends.cudnn
    on = where.type == "cuda" and cudnn.conv.fp32_precision == "tf32"
    return on and torch.cuda.get_device_capability(where) >= (8, 0)


def _memory(where: torch.device) -> float:
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def cpu_model() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
