"""A device's rates from timed ops: least squares of relative errors.

A sample is a few ops that took some seconds together.  With the unknowns s, seconds for each FLOP of a class of
products, for each byte of a class, and for each launch, `splitc.cost_models.compute.roofline` says

    fitted = sum over ops of  a + m - overlap * min(a, m) + launches * s[launch]               (1)
             a = (flops + filling) s[class],  m = moved s[class, or class_moved of a product]

and of convolutions launches * s[conv_launch] besides.

    minimise the sum over samples of (fitted / measured - 1)^2,  s >= 0                        (2)

For a given overlap and given smaller parts (1) is linear, and (2) a problem of non-negative least squares (Lawson and
Hanson 1974, algorithm NNLS).  The smaller parts are those of the solution before, a few times over; of a few overlaps,
each begun from the one before, the one with the least sum is taken.  A sample that is off by more than `_FAR` counts as
in a sum of absolute errors (Huber 1964): an op that the model knows nothing of must not bend the rates of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitc.cost_models.compute.roofline import ops_seconds
from splitc.ir.cluster import Device
from splitc.ir.costs import OpCost

Vector = NDArray[np.float64]

OVERLAPS = (0.0, 0.5, 1.0)
_FAR = 0.3
_ROUNDS = 12  # of choosing smaller parts and weights anew
_TINY = 1e-12
_FASTEST = 1e15  # FLOP/s or bytes/s
_LAUNCH, _CONV_LAUNCH = "launch", "conv_launch"


@dataclass(frozen=True)
class Sample:
    """Ops in one direction, and the seconds they took together."""

    what: str
    ops: tuple[OpCost, ...]
    seconds: float


@dataclass(frozen=True)
class Rates:
    """What was fitted.

    flops: class -> FLOP/s; moved: class -> bytes/s; of a backward under "<class>_backward".
    launch, conv_launch: seconds.
    """

    flops: Mapping[str, float]
    moved: Mapping[str, float]
    launch: float
    conv_launch: float
    overlap: float

    def device(self, name: str, memory: float, others: Mapping[str, float]) -> Device:
        """The device with these rates in float32.  others: the FLOP/s of matrix products in other dtypes."""
        peak, bandwidth = max(self.flops.values()), max(self.moved.values())
        efficiency = {op: rate / peak for op, rate in self.flops.items()}
        efficiency |= {op: rate / bandwidth for op, rate in self.moved.items()}
        reached = efficiency["matmul"]
        return Device(
            name=name,
            flop_rate={"float32": peak, **{dtype: rate / reached for dtype, rate in others.items()}},
            memory_bandwidth=bandwidth,
            memory=memory,
            efficiency=efficiency,
            launch=self.launch,
            conv_launch=self.conv_launch,
            overlap=self.overlap,
        )


def fit_rates(samples: Sequence[Sample], overlaps: Iterable[float] = OVERLAPS) -> Rates:
    """The rates that explain samples best; the same for the same samples."""
    problem = _Problem(samples)
    found, fits = np.zeros(len(problem.unknowns)), []
    for overlap in overlaps:
        found, loss = problem.solve(overlap, found)
        fits.append((loss, overlap, found))
    _, overlap, found = min(fits, key=lambda fit: fit[0])
    return problem.rates(overlap, found)


def fitted(sample: Sample, device: Device) -> float:
    """Seconds of a sample by the device's numbers."""
    return ops_seconds(sample.ops, device, "float32")


class _Problem:
    """Equation (2) for samples.  Unknown k is the seconds of one `unknowns[k]`."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        rates = dict.fromkeys(key for sample in samples for op in sample.ops for key in _keys(op) if key)
        self.unknowns = [*rates, _LAUNCH, _CONV_LAUNCH]
        self._index = {key: k for k, key in enumerate(self.unknowns)}
        self._seconds = np.array([sample.seconds for sample in samples])

    def solve(self, overlap: float, found: Vector) -> tuple[Vector, float]:
        """The seconds of each unknown, and the sum of (2); `found` are those of an overlap nearby."""
        weights = np.ones(len(self.samples))
        best = found, np.inf
        for _ in range(_ROUNDS):
            rows = self._rows(overlap, found) / self._seconds[:, None]
            found = nnls(rows * weights[:, None], weights)
            errors = abs(self._rows(overlap, found) @ found / self._seconds - 1)
            weights = np.sqrt(np.minimum(1.0, _FAR / np.maximum(errors, 1e-12)))
            loss = float(np.where(errors < _FAR, errors**2, _FAR * (2 * errors - _FAR)).sum())
            if loss < best[1]:
                best = found, loss
        return best

    def rates(self, overlap: float, found: Vector) -> Rates:
        seconds = dict(zip(self.unknowns, found.tolist(), strict=True))
        launch, conv_launch = seconds.pop(_LAUNCH), seconds.pop(_CONV_LAUNCH)
        per = {key: 1 / each if each > 0 else math.inf for key, each in seconds.items()}
        flops = {key.removesuffix(" flops"): rate for key, rate in per.items() if key.endswith(" flops")}
        moved = {key: rate for key, rate in per.items() if not key.endswith(" flops")}
        return Rates(_finite(flops), _finite(moved), launch, conv_launch, overlap)

    def _rows(self, overlap: float, found: Vector) -> Vector:
        """What (1) multiplies each unknown by, where the smaller parts are those of `found`."""
        rows = np.zeros((len(self.samples), len(self.unknowns)))
        for row, sample in zip(rows, self.samples, strict=True):
            for op in sample.ops:
                row[self._index[_LAUNCH]] += op.kernel_launches
                row[self._index[_CONV_LAUNCH]] += op.kernel_launches * (op.op_class == "conv")
                computing, moving = _keys(op)
                moved = op.bytes_accessed
                if computing:
                    flops, k = op.flops + op.padding_flops, self._index[computing]
                    hidden = flops * found[k] < moved * found[self._index[moving]]
                    row[k] += flops * (1 - overlap * hidden)
                    moved *= 1 - overlap * (not hidden)
                row[self._index[moving]] += moved
        return rows


def _keys(op: OpCost) -> tuple[str, str]:
    """The unknowns of an op: of its FLOPs, "" for one without, and of its bytes."""
    backward = "_backward" if op.backward else ""
    if op.flops:
        return f"{op.op_class}{backward} flops", f"{op.op_class}_moved"
    return "", f"{op.op_class}{backward}"


def _finite(rates: Mapping[str, float]) -> dict[str, float]:
    """What took no time is as fast as the fastest that did."""
    fastest = max((rate for rate in rates.values() if math.isfinite(rate)), default=_FASTEST)
    return {key: min(rate, fastest) for key, rate in rates.items()}


def nnls(matrix: Vector, target: Vector) -> Vector:
    """The x >= 0 for which |matrix x - target| is least."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x: Vector = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        slope = a.T @ (target - a @ x)
        if not (~free & (slope > _TINY)).any():
            break
        free[np.argmax(np.where(free, -np.inf, slope))] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            way = x[below] - trial[below]
            x = x + float(np.divide(x[below], way, out=np.zeros_like(way), where=way > 0).min()) * (trial - x)
            free &= x > _TINY
    found: Vector = x / scale
    return found
