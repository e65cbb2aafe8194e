"""The commands that make, shape and remove the network of a testbed, as plain data: read and tested without root.

    namespace <label>-switch               a bridge, and a port rank0, rank1, ... for each rank
    namespace <label>-rank0, -rank1, ...   eth0, the other end of the port, with the rank's address

The bridge has a namespace of its own too: nothing is added to the machine's own network, and removing the namespaces
removes everything.  A label tells the process that made it, so that what a crashed run left behind is known as such.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.errors import BenchmarkError

PREFIX = "splitc-testbed"
INTERFACE = "eth0"  # in the namespace of every rank
QUEUE_SECONDS = 0.05  # how long a frame may wait at a shaped link before it is dropped
BURST_SECONDS = 0.002  # what a shaped link may send at once after a pause, and never less than ten frames

_ETHERNET = 14  # bytes of a frame besides its MTU
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)-\d+(-switch|-rank\d+)?")

Command = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The network of one testbed.

    label: leads the names of its namespaces.  rates: bytes/s of each rank's link, both ways; None is no limit.
    mtu: bytes of a frame without its Ethernet header.  congestion: TCP's congestion control in the namespaces.
    """

    label: str
    world: int
    rates: tuple[float | None, ...]
    mtu: int = 1500
    congestion: str = "reno"

    @property
    def switch(self) -> str:
        return f"{self.label}-switch"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *map(self.namespace, range(self.world)))

    def namespace(self, rank: int) -> str:
        return f"{self.label}-rank{rank}"

    def address(self, rank: int) -> str:
        """The address of a rank; no other network sees it."""
        return f"10.77.{(rank + 1) // 256}.{(rank + 1) % 256}"

    def build(self) -> Iterator[Command]:
        """The bridge in its namespace, then what each rank has."""
        yield from self._namespace(self.switch)
        yield ("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge", "stp_state", "0")
        yield ("ip", "-n", self.switch, "link", "set", "switch", "mtu", str(self.mtu), "up")
        for rank in range(self.world):
            yield from self.machine(rank)

    def machine(self, rank: int) -> Iterator[Command]:
        """The namespace of a rank and its link, shaped."""
        yield from self._namespace(self.namespace(rank))
        yield from self._link(rank)
        yield from self._reshape(rank, None, self.rates[rank])

    def remove(self, rank: int) -> Iterator[Command]:
        """What `machine` has made; the link by itself, since sockets that wait for an answer keep a namespace."""
        yield ("ip", "-n", self.switch, "link", "delete", f"rank{rank}")
        yield ("ip", "netns", "delete", self.namespace(rank))

    def reshape(self, rates: tuple[float | None, ...]) -> Iterator[Command]:
        """From the rates that the links have to `rates`, while whatever runs on them goes on."""
        for rank, (before, after) in enumerate(zip(self.rates, rates, strict=True)):
            yield from self._reshape(rank, before, after)

    def _reshape(self, rank: int, before: float | None, after: float | None) -> Iterator[Command]:
        if before != after:
            for namespace, device in ((self.namespace(rank), INTERFACE), (self.switch, f"rank{rank}")):
                yield self._unshape(namespace, device) if after is None else self._shape(namespace, device, after)

    def plug(self, rank: int, up: bool) -> Command:
        """Pull the cable of a rank out of the switch, or put it back."""
        return ("ip", "-n", self.switch, "link", "set", f"rank{rank}", "up" if up else "down")

    def counters(self, rank: int) -> Command:
        """Print the kernel's counters of a rank's end of its link as JSON."""
        return ("ip", "-n", self.namespace(rank), "-j", "-s", "link", "show", "dev", INTERFACE)

    def _namespace(self, name: str) -> Iterator[Command]:
        yield ("ip", "netns", "add", name)
        # IPv6 would send its own announcements, and they would be counted.
        yield _inside(name, "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || true")

    def _link(self, rank: int) -> Iterator[Command]:
        name, port = self.namespace(rank), f"rank{rank}"
        # One segment at a time: otherwise 64 KiB would pass, and be counted, as one frame with one header.
        ends = ("mtu", str(self.mtu), "gso_max_segs", "1")
        number = rank + 1  # and a machine that comes back has its card still, which the others remember
        card = f"02:00:0a:4d:{number // 256:02x}:{number % 256:02x}"
        peer = ("peer", "name", INTERFACE, "address", card, "netns", name)
        yield ("ip", "-n", self.switch, "link", "add", port, *ends, "type", "veth", *peer[:5], *ends, *peer[5:])
        yield ("ip", "-n", self.switch, "link", "set", port, "master", "switch", "up")
        yield ("ip", "-n", name, "addr", "add", f"{self.address(rank)}/16", "dev", INTERFACE)
        yield ("ip", "-n", name, "link", "set", INTERFACE, "up")
        yield ("ip", "-n", name, "link", "set", "lo", "up")
        yield _inside(name, f"echo {self.congestion} > /proc/sys/net/ipv4/tcp_congestion_control")

    def _shape(self, namespace: str, device: str, rate: float) -> Command:
        burst = max(10 * (self.mtu + _ETHERNET), round(rate * BURST_SECONDS))
        shape = ("rate", f"{round(rate * 8)}bit", "burst", str(burst), "latency", f"{round(QUEUE_SECONDS * 1e3)}ms")
        return ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def _unshape(self, namespace: str, device: str) -> Command:
        return ("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")


def _inside(namespace: str, script: str) -> Command:
    return ("ip", "netns", "exec", namespace, "sh", "-c", script)


def new_label(pid: int, started: int, number: int) -> str:
    """The label of a process's testbed.  started: ticks since boot, to tell it from an earlier process with its id."""
    return f"{PREFIX}-{pid}-{started}-{number}"


def leftovers(names: Iterable[str], started: Callable[[int], int | None]) -> list[str]:
    """Those of `names` that a testbed made whose process is gone.

    started: when a process started, None if there is none.
    """
    found = ((name, _NAME.fullmatch(name)) for name in names)
    return [name for name, match in found if match is not None and started(int(match[1])) != int(match[2])]


def for_each(value: float | Iterable[float | None] | None, world: int, what: str) -> tuple[float | None, ...]:
    """One value for each rank, given once or by rank.  Raises BenchmarkError for another number, and for <= 0."""
    values = (value,) * world if value is None or isinstance(value, int | float) else tuple(value)
    if len(values) != world:
        raise BenchmarkError(f"{what}: {len(values)} values for {world} ranks; give one for all, or one for each")
    if wrong := [each for each in values if each is not None and not 0 < each < float("inf")]:
        raise BenchmarkError(f"{what}: {wrong[0]} is not above 0")
    return values


def parse_rate(text: str) -> float:
    """`230Mbit` -> 28.75e6 bytes/s.  Raises BenchmarkError for what is no rate."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]?)bit(?:/s)?", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise BenchmarkError(f"{text!r} is no rate; write 230Mbit or 1.5Gbit")
    return float(found[1]) * _UNITS[found[2]] / 8


def parse_rates(text: str) -> float | list[float]:
    """`230Mbit` is every rank's; `230Mbit,100Mbit` is rank 0's and rank 1's."""
    rates = [parse_rate(part) for part in text.split(",")]
    return rates[0] if len(rates) == 1 else rates
