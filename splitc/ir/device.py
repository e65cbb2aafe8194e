"""What one device and one link is, in SI base units: FLOP/s, bytes/s, bytes, seconds; and the slowest of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from splitc.ir.decode import Keys, Limit, at_least, more_than, typed_fields

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_PRODUCTS = ("matmul", "conv", "attention")  # with one efficiency of their FLOPs, and one (`_moved`) of their bytes
_OF_MEMORY = ("memory", "math", "batch_norm", "pool", "max_pool", "random", *(f"{op}_moved" for op in _PRODUCTS))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_BETTER = ("bandwidth", "memory_bandwidth", "memory", "overlap", "duplex")  # the more, the better
EFFICIENCIES = tuple(f"{op}{end}" for end in ("", "_backward") for op in (*_PRODUCTS, *_OF_MEMORY))
_FALLBACK = {  # the op class whose efficiency is used if a class has none
    **dict.fromkeys(_OF_MEMORY, "memory"),
    "max_pool": "pool",
    "conv": "matmul",
    "attention": "matmul",
}

Name = Annotated[str, Limit(bool, "of at least one letter")]
Positive = Annotated[float, more_than(0)]
_NotNegative = Annotated[float, at_least(0)]
_Fraction = Annotated[float, more_than(0, most=1)]


@typed_fields
@dataclass(frozen=True)
class Device:
    """The device of one rank.

    flop_rate: dtype name -> peak FLOP/s; "tf32": of float32 convolutions, where they use TensorFloat-32.
    memory_bandwidth: bytes/s.  memory: bytes.
    efficiency: op class -> fraction of the peak that is reached: of the FLOP rate "matmul", "conv" and "attention"; of
    the memory bandwidth "memory", "math" (exponentials and the like), "batch_norm", "pool", "max_pool", "random", and
    "matmul_moved" and the like for the memory traffic of products; for a backward "conv_backward" and the like.
    launch: seconds to start one op.  conv_launch: additional seconds to start a convolution.
    overlap: fraction of the smaller of an op's arithmetic and memory time that is hidden behind the larger.
    jitter: variance of the time of a computation for each second of it (s): one of t seconds takes t +- sqrt(jitter t).
    """

    name: Name
    flop_rate: Annotated[Mapping[str, Positive], Keys(DTYPES)]
    memory_bandwidth: Positive
    memory: Positive
    efficiency: Annotated[Mapping[str, _Fraction], Keys(EFFICIENCIES, needed=("matmul", "memory"))]
    launch: _NotNegative
    conv_launch: _NotNegative = 0.0
    overlap: Annotated[float, at_least(0, most=1)] = 1.0
    jitter: _NotNegative = 0.0

    def efficiency_of(self, op: str, backward: bool = False) -> float:
        """Efficiency of an op class: its own, else that of its forward, else that of its fallback class."""
        if backward and f"{op}_backward" in self.efficiency:
            return self.efficiency[f"{op}_backward"]
        if op in self.efficiency or op == _FALLBACK.get(op, op):
            return self.efficiency[op]
        return self.efficiency_of(_FALLBACK[op], backward)

    def scaled(self, factor: float) -> Device:
        """A device with `factor` times the FLOP rates and memory bandwidth, and the same launch times."""
        return replace(
            self,
            flop_rate={dtype: rate * factor for dtype, rate in self.flop_rate.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
        )

    def slowed(self, factor: float) -> Device:
        """A device that takes `factor` times as long for everything."""
        launches = {name: getattr(self, name) * factor for name in ("launch", "conv_launch", "jitter")}
        return replace(self.scaled(1 / factor), **launches)


@typed_fields
@dataclass(frozen=True)
class Rate:
    """Measured performance of a collective: seconds = latency * rounds + bytes that each rank sends / bandwidth.

    Rounds and bytes are those of the ring algorithm.
    """

    bandwidth: Positive
    latency: _NotNegative


@typed_fields
@dataclass(frozen=True)
class Link:
    """The link of a rank to others.

    bandwidth: bytes/s of one direction.  latency: seconds for one message.
    duplex: it sends and receives at full bandwidth at the same time.
    shared: all ranks of a host share this link; else each rank has its own.
    processor: seconds of compute time that each byte costs a rank that sends or receives it while it computes.
    message_processor: seconds of compute time that each message costs both its ranks besides; a round of a collective
    is one that is sent and one that is received.
    collectives: measured rates of `COLLECTIVES`; one that is missing is priced as messages on the link.
    """

    bandwidth: Positive
    latency: _NotNegative
    duplex: bool = True
    shared: bool = False
    processor: _NotNegative = 0.0
    message_processor: _NotNegative = 0.0
    collectives: Annotated[Mapping[str, Rate], Keys(COLLECTIVES, flat=True)] = field(default_factory=dict)

    def with_bandwidth(self, bandwidth: float) -> Link:
        """The same link at another bandwidth (bytes/s); measured collectives in proportion."""
        factor = bandwidth / self.bandwidth
        rates = {k: replace(rate, bandwidth=rate.bandwidth * factor) for k, rate in self.collectives.items()}
        return replace(self, bandwidth=bandwidth, collectives=rates)

    def divided(self, among: float) -> Link:
        """The share of each of `among` equal users that use the link at the same time."""
        return self if among == 1 else self.with_bandwidth(self.bandwidth / among)


def slowest_device(devices: Sequence[Device]) -> Device:
    """The device with the lowest of every number."""
    first, *more = devices
    if not more:
        return first
    dtypes = [dtype for dtype in first.flop_rate if all(dtype in each.flop_rate for each in more)]
    rates = {dtype: min(each.flop_rate[dtype] for each in devices) for dtype in dtypes}
    bandwidth = min(each.memory_bandwidth for each in devices)

    def efficiency(name: str) -> float:
        """The efficiency relative to the lowest peak; a device with a higher peak reaches a larger fraction of it."""
        op = name.removesuffix("_backward")
        of_memory = op in _OF_MEMORY
        peaks = [({"memory": each.memory_bandwidth} if of_memory else each.flop_rate, each) for each in devices]
        least = {"memory": bandwidth} if of_memory else rates
        parts = [peak[k] / least[k] * each.efficiency_of(op, name != op) for peak, each in peaks for k in least]
        return min(parts, default=first.efficiency_of(op, name != op))

    return Device(
        **_worst(devices),
        name=" and ".join(dict.fromkeys(each.name for each in devices)),
        flop_rate=rates,
        efficiency={name: efficiency(name) for name in EFFICIENCIES},
    )


def slowest_link(links: Sequence[Link]) -> Link:
    """The link with the worst of every number; a collective is measured if it is on all of them."""
    if all(link == links[0] for link in links):
        return links[0]
    known = [name for name in COLLECTIVES if all(name in each.collectives for each in links)]
    rates = {name: Rate(**_worst([each.collectives[name] for each in links])) for name in known}
    return Link(**_worst(links), collectives=rates)


def _worst(alike: Sequence[Device] | Sequence[Link] | Sequence[Rate]) -> dict[str, Any]:
    """The worst of every number that several have, by name."""
    named = vars(alike[0]).items()
    numbers = {k: [vars(each)[k] for each in alike] for k, value in named if isinstance(value, int | float)}
    return {k: min(values) if k in _BETTER else max(values) for k, values in numbers.items()}
