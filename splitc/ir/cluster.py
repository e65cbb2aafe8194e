"""A cluster: the devices and the links that a plan is priced on.  `cluster_file` reads and writes it as TOML.

Ranks are numbered over the hosts, host after host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from splitc.ir.decode import Count, Limit, typed_fields
from splitc.ir.device import Device, Link, Name, Positive, slowest_device, slowest_link

_RANKS = Limit(lambda ranks: ranks and all(type(rank) is int and rank >= 0 for rank in ranks), "of ranks, as [2, 3]")
_TABLES = Limit(lambda tables: True, "of tables; write [[unlike]] over each")


@typed_fields
@dataclass(frozen=True)
class Unlike:
    """Ranks whose device or link differs from that of the others."""

    ranks: Annotated[tuple[int, ...], _RANKS]
    device: Device
    link: Link


@dataclass(frozen=True)
class Learned:
    """What runs on a cluster have changed in its numbers.

    base: digest of the numbers before.  factors: what takes how many times as long as those say.  runs: their number.
    ran: hash of a plan -> its measured step (s).  seen: kind of transfer -> least and most ranks and bytes of those
    that ran; kind of op -> nothing.
    """

    base: str
    factors: Mapping[str, Positive]
    runs: Count = 1
    ran: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@typed_fields
@dataclass(frozen=True)
class Cluster:
    """Devices joined by links.

    device, link: of every rank that is not in `unlike`.  The link connects it to all others, with a `local_link` to the
    ranks of other hosts.  local_link: between the `ranks_per_host` ranks of a host; without it every rank is a host.
    site_link: between ranks of different sites, of `ranks_per_site` ranks each; without it there is one site.
    world: number of devices; None if there is no limit.  source: where the numbers are from.
    ranks_share_device: the ranks of a host, or without hosts all ranks, compute on the same `cores`.  The device is one
    core; each of n computing ranks has cores / n of it, at most one, and 1/n of the memory.
    learned: from runs, which is in the numbers already.
    """

    name: Name
    device: Device
    link: Link
    world: Count | None = None
    ranks_share_device: bool = False
    source: str = ""
    cores: Count = 1
    local_link: Link | None = None
    ranks_per_host: Count | None = None
    site_link: Link | None = None
    ranks_per_site: Count | None = None
    unlike: Annotated[tuple[Unlike, ...], _TABLES] = ()
    learned: Learned | None = None

    # -- devices -------------------------------------------------------------------------------------------------------

    def device_of(self, rank: int, computing: int = 1) -> Device:
        """The device of `rank` while the first `computing` ranks compute."""
        device = self._like(rank).device
        sharing = min(computing, self.ranks_per_host or computing)
        if not self.ranks_share_device or sharing == 1:
            return device
        part = min(1.0, self.cores / sharing)
        # Starting ops is the work of one thread.  Where the one "core" is a whole processor, others run beside it.
        shared = device.slowed(1 / part) if self.cores > 1 else device.scaled(part)
        return replace(shared, memory=device.memory / sharing)

    def device_for(self, ranks: int) -> Device:
        """The slowest device of the first `ranks` ranks while all of them compute, which closed forms price."""
        usual = next((rank for rank in range(ranks) if not self.kind_of(rank)), None)
        kinds = [min(each.ranks) for each in self.unlike if min(each.ranks) < ranks]
        return slowest_device([self.device_of(rank, ranks) for rank in (kinds if usual is None else [usual, *kinds])])

    def kind_of(self, rank: int) -> int:
        """What is equal for ranks with equal devices and links: a number, 0 of those that are not `unlike`."""
        return self._kind_of.get(rank, 0)

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        return {rank: k for k, each in enumerate(self.unlike, start=1) for rank in each.ranks}

    def _like(self, rank: int) -> Cluster | Unlike:
        """What has the device and the link of `rank`."""
        kind = self.kind_of(rank)
        return self.unlike[kind - 1] if kind else self

    # -- links ---------------------------------------------------------------------------------------------------------

    def host_of(self, rank: int) -> int:
        """The host of `rank`."""
        return rank // self.ranks_per_host if self.ranks_per_host else rank

    def site_of(self, rank: int) -> int:
        """The site of `rank`."""
        return rank // self.ranks_per_site if self.ranks_per_site else 0

    def crosses_sites(self, ranks: Iterable[int]) -> bool:
        """Whether ranks are of several sites."""
        return self.site_link is not None and len(set(map(self.site_of, ranks))) > 1

    def link_of(self, rank: int) -> Link:
        """The link of `rank` to ranks of other hosts."""
        return self._like(rank).link

    def link_over(self, *groups: Collection[int], rings: bool = True) -> Link:
        """The slowest link that concurrent collectives of groups of ranks use.

        Within one host that is its local link.  Over several hosts it is that of the slowest host: rings in the order
        of ranks leave a host once each, so the ranks of a group on a host carry its outgoing traffic together, each on
        its own link; a shared link is divided among the groups.  Without `rings` every rank sends for itself.  Over
        several sites it is the link between them, likewise.
        """
        if self.site_link is not None and (over := [group for group in groups if self.crosses_sites(group)]):
            sites = [Counter(map(self.site_of, group)) for group in over]
            most = max(sum((Counter(each.keys()) if rings else each for each in sites), Counter[int]()).values())
            link = self.site_link.divided(most) if self.site_link.shared else self.site_link
            inside = [group for group in groups if not self.crosses_sites(group)]
            return slowest_link([link, self.link_over(*inside, rings=rings)]) if inside else link
        if self.local_link is None:
            return self._slowest_over(rank for group in groups for rank in group)
        hosts = [self._by_host(group) for group in groups]
        crossing = [found for found in hosts if len(found) > 1]
        users: Counter[int] = Counter()
        for found in crossing:
            users.update({host: 1 if rings else len(members) for host, members in found.items()})
        ways = [self._way_out(found[host], users[host], rings) for found in crossing for host in found]
        return slowest_link([*ways, self.local_link] if len(crossing) < len(hosts) else ways)

    def link_across(self, here: Sequence[int], there: Sequence[int]) -> Link:
        """The link that concurrent messages between ranks of `here` and of `there` use, for the busiest rank.

        Every rank of a side has an equal part of the bytes.  Within one host it is the local link; else the slowest of
        the ranks' links, divided, if it is shared, among the ranks of a host.  Likewise between sites.
        """
        if self.site_link is not None and self.crosses_sites({*here, *there}):
            return _crowded(self.site_link, here, there, self.site_of)
        if self.local_link is not None and len(self._by_host({*here, *there})) == 1:
            return self.local_link
        link = self._slowest_over({*here, *there})
        return _crowded(link, here, there, self.host_of) if self.ranks_per_host else link

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """The same cluster with another bandwidth (bytes/s) between hosts, on all links alike."""
        return replace(
            self,
            link=self.link.with_bandwidth(bandwidth),
            unlike=tuple(replace(each, link=each.link.with_bandwidth(bandwidth)) for each in self.unlike),
        )

    def _by_host(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Host -> those of `ranks` that are on it."""
        hosts = defaultdict(list)
        for rank in ranks:
            hosts[self.host_of(rank)].append(rank)
        return hosts

    def _way_out(self, members: list[int], users: int, rings: bool) -> Link:
        """The link of `members`, a group's ranks on one host, to other hosts while `users` groups share it."""
        link = self._slowest_over(members)
        if link.shared:
            link = link.divided(users)
        if self.local_link is None or not rings or len(members) == 1:
            return link
        together = link.bandwidth if link.shared else link.bandwidth * len(members)
        return replace(link, bandwidth=min(together, self.local_link.bandwidth))

    def _slowest_over(self, ranks: Iterable[int]) -> Link:
        """The slowest of the links of `ranks`."""
        if not self.unlike:
            return self.link
        return slowest_link(list({id(link): link for link in map(self.link_of, ranks)}.values()))


def _crowded(link: Link, here: Sequence[int], there: Sequence[int], place: Callable[[int], int]) -> Link:
    """The share of the busiest rank of a link that the ranks of a place share, if they do."""
    if not link.shared:
        return link
    fewer = min(len(here), len(there))
    crowds = ((n, len(side)) for side in (here, there) for n in Counter(map(place, side)).values())
    return link.divided(max(n * fewer / size for n, size in crowds))
