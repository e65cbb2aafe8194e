"""A cluster: the devices and the links that a plan is priced on.  `cluster_file` reads and writes it as TOML.

Numbers are SI base units: FLOP/s, bytes/s, bytes, seconds.  Ranks are numbered over the hosts, host after host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
OP_CLASSES = ("matmul", "conv", "attention", "memory", "math", "batch_norm", "pool", "max_pool", "random")
MOVED = ("matmul_moved", "conv_moved", "attention_moved")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_LIKE = {  # what an op class without an efficiency of its own has
    **dict.fromkeys(("conv", "attention"), "matmul"),
    **dict.fromkeys(("math", "batch_norm", "pool", "random", *MOVED), "memory"),
    "max_pool": "pool",
}


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    flop_rate: dtype name -> peak FLOP/s.  memory_bandwidth: bytes/s.  memory: bytes.
    efficiency: op class -> part of the peak that is reached, 0 to 1: "matmul" and "memory", and where they differ
    "conv" and "attention"; "math" (exponentials and their like), "batch_norm", "pool" and "random", of the memory
    bandwidth; "matmul_moved" and its like, of the bytes that products move; the backward of each, as "conv_backward".
    launch: seconds that starting one op takes.
    overlap: part of an op's memory traffic that hides behind its arithmetic, or the other way round; 1: all of it.
    """

    name: str
    flop_rate: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    efficiency: Mapping[str, float]
    launch: float
    overlap: float = 1.0

    def reached(self, op: str, backward: bool = False) -> float:
        """The part of its peak that ops of a class reach: its own, else forward's, else that of what it is like."""
        if backward and f"{op}_backward" in self.efficiency:
            return self.efficiency[f"{op}_backward"]
        if op in self.efficiency or op not in _LIKE:
            return self.efficiency[op]
        return self.reached(_LIKE[op], backward)

    def scaled(self, factor: float) -> Device:
        """A device whose rates are `factor` times these."""
        return replace(
            self,
            flop_rate={dtype: rate * factor for dtype, rate in self.flop_rate.items()},
            memory_bandwidth=self.memory_bandwidth * factor,
            launch=self.launch / factor,
        )


@dataclass(frozen=True)
class Rate:
    """What a backend's collective was measured to reach.

    seconds = latency * rounds + bytes that each rank sends / bandwidth, with rounds and bytes of the ring.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Link:
    """What joins a rank to others.

    bandwidth: bytes/s of one direction.  latency: seconds for one message.
    duplex: it sends and receives at full bandwidth at the same time.
    shared: all ranks of a host have this one link together; else each rank has its own.
    processor: seconds of computing that each byte takes from a rank that sends or receives it meanwhile.
    collectives: of `COLLECTIVES`, what was measured; what is not there is priced as messages on the link.
    """

    bandwidth: float
    latency: float
    duplex: bool = True
    shared: bool = False
    processor: float = 0.0
    collectives: Mapping[str, Rate] = field(default_factory=dict)

    def with_bandwidth(self, bandwidth: float) -> Link:
        """The same link at another bandwidth (bytes/s); measured collectives in proportion."""
        factor = bandwidth / self.bandwidth
        rates = {k: replace(rate, bandwidth=rate.bandwidth * factor) for k, rate in self.collectives.items()}
        return replace(self, bandwidth=bandwidth, collectives=rates)


@dataclass(frozen=True)
class Unlike:
    """Ranks that have another device, or another link, than the others."""

    ranks: tuple[int, ...]
    device: Device
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Devices joined by links.

    device, link: of every rank that is not among `unlike`; the link joins it to all others, or with `local_link` to
    those of other hosts.  local_link: between the ranks of a host, of which there are `ranks_per_host`; without that
    number every rank is a host of its own.
    world: how many devices there are; None when there is no limit.  source: where the numbers are from.
    ranks_share_device: ranks compute on the same `cores`, of which the device is one: of n ranks that compute, each has
    cores / n of it, and 1/n of all memory.
    """

    name: str
    device: Device
    link: Link
    world: int | None = None
    ranks_share_device: bool = False
    source: str = ""
    cores: int = 1
    local_link: Link | None = None
    ranks_per_host: int | None = None
    unlike: tuple[Unlike, ...] = ()

    # -- devices -------------------------------------------------------------------------------------------------------

    def device_of(self, rank: int, computing: int = 1) -> Device:
        """What `rank` has while `computing` ranks compute."""
        device = next((each.device for each in self.unlike if rank in each.ranks), self.device)
        if not self.ranks_share_device or computing == 1:
            return device
        shared = device.scaled(min(1.0, self.cores / computing))
        return replace(shared, memory=device.memory / computing, launch=device.launch)

    def device_for(self, ranks: int) -> Device:
        """What the slowest of the first `ranks` ranks has while all of them compute: what a closed form prices."""
        found = [self.device_of(self._usual(ranks), ranks)]
        found += [self.device_of(each.ranks[0], ranks) for each in self.unlike if min(each.ranks) < ranks]
        return found[0] if len(found) == 1 else _slowest(found)

    def _usual(self, ranks: int) -> int:
        """A rank below `ranks` that is not unlike the others, if there is one."""
        odd = {rank for each in self.unlike for rank in each.ranks}
        return next((rank for rank in range(ranks) if rank not in odd), 0)

    # -- links ---------------------------------------------------------------------------------------------------------

    def host_of(self, rank: int) -> int:
        """The number of the host that `rank` is on."""
        return rank // self.ranks_per_host if self.ranks_per_host else rank

    def link_of(self, rank: int) -> Link:
        """What joins `rank` to ranks of other hosts."""
        return next((each.link for each in self.unlike if rank in each.ranks), self.link)

    def link_between(self, a: int, b: int) -> Link:
        """The path from rank `a` to rank `b`: as fast as the slower end of it."""
        return self.link_over((a, b))

    def link_over(self, ranks: Iterable[int]) -> Link:
        """What a collective of `ranks` runs on: the hosts' own link within one host, else the slowest of theirs."""
        members = tuple(ranks)
        if self.local_link is not None and len({self.host_of(rank) for rank in members}) == 1:
            return self.local_link
        if not self.unlike:
            return self.link
        return _narrowest([self.link_of(rank) for rank in members])

    def link_for(self, ranks: int) -> Link:
        """What the first `ranks` ranks talk over: `link_over` of them."""
        if self.local_link is not None and self.ranks_per_host and ranks <= self.ranks_per_host:
            return self.local_link
        return self.link if not self.unlike else self.link_over(range(ranks))

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """The same cluster with another bandwidth (bytes/s) between hosts, on all links alike."""
        return replace(
            self,
            link=self.link.with_bandwidth(bandwidth),
            unlike=tuple(replace(each, link=each.link.with_bandwidth(bandwidth)) for each in self.unlike),
        )


def _slowest(devices: list[Device]) -> Device:
    """A device that is as slow as the slowest in everything."""
    first = devices[0]
    dtypes = [dtype for dtype in first.flop_rate if all(dtype in each.flop_rate for each in devices)]
    ops = dict.fromkeys(op for each in devices for op in each.efficiency)

    return Device(
        name=" and ".join(dict.fromkeys(each.name for each in devices)),
        flop_rate={dtype: min(each.flop_rate[dtype] for each in devices) for dtype in dtypes},
        memory_bandwidth=min(each.memory_bandwidth for each in devices),
        memory=min(each.memory for each in devices),
        efficiency={op: min(each.reached(*_op_class(op)) for each in devices) for op in ops},
        launch=max(each.launch for each in devices),
        overlap=min(each.overlap for each in devices),
    )


def _op_class(name: str) -> tuple[str, bool]:
    """`conv_backward` -> ("conv", True)."""
    return name.removesuffix("_backward"), name.endswith("_backward")


def _narrowest(links: list[Link]) -> Link:
    """A link that is as slow as the slowest in everything."""
    rates = {
        name: Rate(
            min(each.collectives[name].bandwidth for each in links),
            max(each.collectives[name].latency for each in links),
        )
        for name in COLLECTIVES
        if all(name in each.collectives for each in links)
    }
    return Link(
        bandwidth=min(each.bandwidth for each in links),
        latency=max(each.latency for each in links),
        duplex=all(each.duplex for each in links),
        shared=any(each.shared for each in links),
        processor=max(each.processor for each in links),
        collectives=rates,
    )
