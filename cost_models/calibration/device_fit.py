"""Fit a device's rates to timed ops by least squares of relative errors.

A sample is a few ops and the seconds they took together.  The unknowns s are seconds per FLOP of a class of products,
per byte of a class, and per launch.  By `splitc.cost_models.compute.roofline`

    fitted = sum over ops of  a + m - overlap * min(a, m) + kernel_launches * s[launch]                  (1)
             a = (flops + padding_flops) s[class]
             m = bytes_accessed s[class], of a product s[class_moved]

with an additional kernel_launches * s[conv_launch] for convolutions.

    minimise the sum over samples of (fitted / measured - 1)^2,  s >= 0                                  (2)

For a given overlap, and a given choice of the smaller of a and m for each op, (1) is linear and (2) is non-negative
least squares (Lawson and Hanson 1974, algorithm NNLS).  The choice is iterated: it is the one of the previous solution.
A few overlaps are tried, each from the solution of the previous one, and the one with the least loss is taken.  The
loss is Huber's (1964): errors beyond `_FAR` count linearly, so that ops that the model does not describe do not bend
the rates of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from splitc.cost_models.compute.roofline import ops_seconds
from splitc.ir.costs import OpCost
from splitc.ir.device import Device

Vector = NDArray[np.float64]

OVERLAPS = (0.0, 0.5, 1.0)
_FAR = 0.3
_ROUNDS = 12  # iterations of the choice of smaller parts and of the weights
_TINY = 1e-12
_FASTEST = 1e15  # FLOP/s or bytes/s
_LAUNCH, _CONV_LAUNCH = "launch", "conv_launch"


@dataclass(frozen=True)
class Sample:
    """Ops of one direction, and the seconds they took together."""

    what: str
    ops: tuple[OpCost, ...]
    seconds: float


@dataclass(frozen=True)
class Rates:
    """The fitted rates.

    flop_rates: class -> FLOP/s.  bandwidths: class -> bytes/s.  Those of a backward are under "<class>_backward".
    launch, conv_launch: seconds.
    """

    flop_rates: Mapping[str, float]
    bandwidths: Mapping[str, float]
    launch: float
    conv_launch: float
    overlap: float

    def device(self, name: str, memory: float, others: Mapping[str, float], tf32: bool = False) -> Device:
        """The device with these rates in float32.  others: the FLOP/s of matrix products in other dtypes.

        tf32: the convolutions were timed in TF32, so their part of the float32 peak would hold in no other dtype.
        """
        conv = {op: rate for op, rate in self.flop_rates.items() if tf32 and op.startswith("conv")}
        if conv:
            others = {**others, "tf32": max(conv.values())}
        peak = max(rate for op, rate in self.flop_rates.items() if op not in conv)
        reached, bandwidth = self.flop_rates["matmul"] / peak, max(self.bandwidths.values())
        rates = {"float32": peak, **{dtype: rate / reached for dtype, rate in others.items()}}
        efficiency = {op: rate / rates["tf32" if op in conv else "float32"] for op, rate in self.flop_rates.items()}
        efficiency |= {op: rate / bandwidth for op, rate in self.bandwidths.items()}
        return Device(
            name=name,
            flop_rate=rates,
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
        rates = dict.fromkeys(key for sample in samples for op in sample.ops for key in _unknowns(op) if key)
        self.unknowns = [*rates, _LAUNCH, _CONV_LAUNCH]
        self._index = {key: k for k, key in enumerate(self.unknowns)}
        self._seconds = np.array([sample.seconds for sample in samples])

    def solve(self, overlap: float, found: Vector) -> tuple[Vector, float]:
        """The seconds of each unknown, and the loss; found: the solution for another overlap, to start from."""
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
        flop_rates = {key.removesuffix(" flops"): rate for key, rate in per.items() if key.endswith(" flops")}
        bandwidths = {key: rate for key, rate in per.items() if not key.endswith(" flops")}
        return Rates(_finite(flop_rates), _finite(bandwidths), launch, conv_launch, overlap)

    def _rows(self, overlap: float, found: Vector) -> Vector:
        """The coefficients of the unknowns in (1), with the smaller parts of the solution `found`."""
        rows = np.zeros((len(self.samples), len(self.unknowns)))
        for row, sample in zip(rows, self.samples, strict=True):
            for op in sample.ops:
                row[self._index[_LAUNCH]] += op.kernel_launches
                row[self._index[_CONV_LAUNCH]] += op.kernel_launches * (op.op_class == "conv")
                computing, moving = _unknowns(op)
                nbytes = op.bytes_accessed
                if computing:
                    flops, k = op.flops + op.padding_flops, self._index[computing]
                    hidden = flops * found[k] < nbytes * found[self._index[moving]]
                    row[k] += flops * (1 - overlap * hidden)
                    nbytes *= 1 - overlap * (not hidden)
                row[self._index[moving]] += nbytes
        return rows


def _unknowns(op: OpCost) -> tuple[str, str]:
    """Names of an op's unknowns: that of its FLOPs, "" if it has none, and that of its bytes."""
    backward = "_backward" if op.backward else ""
    if op.flops:
        return f"{op.op_class}{backward} flops", f"{op.op_class}_moved"
    return "", f"{op.op_class}{backward}"


def _finite(rates: Mapping[str, float]) -> dict[str, float]:
    """Give classes that took no time the highest of the other rates."""
    fastest = max((rate for rate in rates.values() if math.isfinite(rate)), default=_FASTEST)
    return {key: min(rate, fastest) for key, rate in rates.items()}


def nnls(matrix: Vector, target: Vector) -> Vector:
    """The x >= 0 that minimises |matrix x - target| (Lawson and Hanson 1974)."""
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
