"""What one rank's device reaches, in a few seconds: best runs of products, a convolution, a copy and one small op."""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from splitc.cluster import Device

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LEAST = 3  # runs of everything, however long they take


@dataclass(frozen=True)
class Residual:
    """Seconds of one thing that was timed, as measured and as the fitted numbers have it."""

    what: str
    measured: float
    fitted: float


@dataclass(frozen=True)
class DeviceFit:
    """A device, and what its numbers miss."""

    device: Device
    residuals: tuple[Residual, ...]


def measure_device(where: torch.device, budget: float, progress: Callable[[str], None]) -> DeviceFit:
    """The device at `where` as this process computes on it, with the threads that torch has here."""
    progress("matrix products")
    matmul = {dtype: _matmul_rate(where, dtype, budget / 8) for dtype in _DTYPES}
    progress("convolutions")
    conv = _conv_rate(where, budget / 5)
    progress("memory")
    copy = _copy_bandwidth(where, budget / 8)
    launch = _launch(where, budget / 8)
    rates = {str(dtype).removeprefix("torch."): rate for dtype, rate in matmul.items()}
    rates["float32"] = peak = max(matmul[torch.float32], conv)
    cuda = where.type == "cuda"
    return DeviceFit(
        Device(
            name=torch.cuda.get_device_name(where) if cuda else cpu_model(),
            flop_rate=rates,
            memory_bandwidth=copy,
            memory=float(torch.cuda.get_device_properties(where).total_memory if cuda else _ram()),
            efficiency={"matmul": matmul[torch.float32] / peak, "conv": conv / peak, "memory": 1.0},
            launch=launch,
        ),
        (),
    )


def _matmul_rate(where: torch.device, dtype: torch.dtype, budget: float) -> float:
    """FLOP/s of square products, as large as fit the budget: a CPU may emulate half precision."""
    rate = 0.0
    for size in (128, 256, 512, 1024, 2048, 4096, 8192):
        flops = 2.0 * size**3
        if rate and 2 * _LEAST * flops / rate > budget / 2:
            break
        a = torch.ones(size, size, dtype=dtype, device=where)
        product = partial(torch.matmul, a, a)
        rate = max(rate, flops / _best(product, where, budget / 6))
    return rate


def _conv_rate(where: torch.device, budget: float) -> float:
    """FLOP/s of a 3x3 convolution in float32, forward."""
    batch, channels, side = (64, 256, 28) if where.type == "cuda" else (4, 64, 28)
    images = torch.ones(batch, channels, side, side, device=where)
    weight = torch.ones(channels, channels, 3, 3, device=where)
    seconds = _best(lambda: torch.conv2d(images, weight, padding=1), where, budget)
    return 2.0 * batch * channels * channels * 9 * side * side / seconds


def _copy_bandwidth(where: torch.device, budget: float) -> float:
    """Bytes/s read and written by a copy of 64 MiB."""
    source = torch.ones(1 << 24, device=where)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), where, budget)


def _launch(where: torch.device, budget: float) -> float:
    """Seconds of one op on a tensor so small that only starting it takes time."""
    small, ops = torch.ones(8, device=where, requires_grad=True), 50

    def chain() -> None:
        value = small
        for _ in range(ops):
            value = value + 1.0

    return _best(chain, where, budget) / ops


def _best(run: Callable[[], object], where: torch.device, budget: float) -> float:
    """Seconds of the fastest run that fits the budget: other processes only ever slow one down."""

    def timed() -> float:
        begin = time.perf_counter()
        run()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter() - begin

    best = math.inf
    timed()
    end = time.perf_counter() + budget
    for runs in itertools.count(1):
        best = min(best, timed())
        if runs >= _LEAST and time.perf_counter() > end:
            break
    return best


def cpu_model() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
