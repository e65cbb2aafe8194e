"""Build a cluster from the measured devices and links of its ranks.

On a CPU the device of a rank is the threads that torch gives it.  A host has `cores` such devices, which its ranks
share.  Ranks with a GPU each, or declared separate, have a device each; ranks whose device or link differs from the
majority's are listed as unlike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitc.cost_models.calibration.devices import DeviceFit
from splitc.cost_models.calibration.link_fit import LinkFit
from splitc.cost_models.compute.roofline import achieved_flop_rate
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.cluster_file import from_data, to_data
from splitc.ir.device import Device, Link

_LIKE_DEVICES = 1.3  # the factor below which rates are alike: of equal ranks under quotas they differ by up to a fifth


@dataclass(frozen=True)
class RankLayout:
    """How the ranks of a calibration are distributed over hosts and devices.

    per_host: ranks per host.  slots: how many of them can compute at once without sharing a device.
    separate: treat every rank as a machine of its own, although all were started on one host.
    """

    world: int
    per_host: int
    slots: int
    gpus: bool
    separate: bool = False

    @property
    def one_machine(self) -> bool:
        """Whether all ranks share the devices of one host."""
        return self.shares_device and self.per_host == self.world

    @property
    def shares_device(self) -> bool:
        """Whether the ranks of a host compute on the same cores, or on fewer GPUs than there are ranks."""
        several = self.per_host > 1 and not self.separate
        return several and (not self.gpus or self.slots < self.per_host)

    @property
    def part(self) -> float:
        """The part of a core that a rank has while all compute."""
        return min(1.0, self.slots / self.per_host) if self.shares_device else 1.0

    def measures(self, rank: int) -> bool:
        """Whether a rank measures its device: at most as many per host as can compute without sharing."""
        return self.separate or rank % self.per_host < self.slots

    @property
    def ranks_per_host(self) -> int | None:
        """Ranks per host; None unless there are several hosts with several ranks each."""
        return self.per_host if not self.separate and 1 < self.per_host < self.world else None


def assemble(name: str, source: str, fits: Sequence[DeviceFit | None], links: LinkFit, ranks: RankLayout) -> Cluster:
    """The cluster with these devices and links; fits: by rank, None for ranks that were not measured."""
    links = _of_whole_cores(links, ranks)
    if ranks.one_machine:
        device = mean_device([fit.device for fit in fits if fit is not None])
        return Cluster(name, device, links.links[0], None, True, source, cores=ranks.slots)
    measured = [fits[rank] or fits[rank // ranks.per_host * ranks.per_host] for rank in range(ranks.world)]
    own = [fit.device for fit in measured if fit is not None]
    groups: dict[int, list[int]] = {}
    for rank in range(ranks.world):
        like = (first for first in groups if links.links[first] == links.links[rank] and alike(own[first], own[rank]))
        groups.setdefault(next(like, rank), []).append(rank)
    usual, *others = sorted(groups.values(), key=lambda members: (-len(members), members))
    return Cluster(
        name=name,
        device=mean_device([own[rank] for rank in usual]),
        link=links.links[usual[0]],
        world=ranks.world,
        ranks_share_device=ranks.shares_device,
        source=source,
        cores=ranks.slots if ranks.shares_device else 1,
        local_link=links.local,
        ranks_per_host=ranks.ranks_per_host,
        unlike=tuple(
            Unlike(tuple(members), mean_device([own[rank] for rank in members]), links.links[members[0]])
            for members in others
        ),
    )


def _of_whole_cores(found: LinkFit, ranks: RankLayout) -> LinkFit:
    """Scale the processor time of a byte to a whole core, where ranks shared cores while it was measured."""

    def scaled(link: Link) -> Link:
        return replace(
            link, processor=link.processor * ranks.part, message_processor=link.message_processor * ranks.part
        )

    return replace(found, links=tuple(map(scaled, found.links)), local=found.local and scaled(found.local))


# -- devices -----------------------------------------------------------------------------------------------------------


def alike(a: Device, b: Device) -> bool:
    """Whether two devices reach nearly the same FLOP rates and memory bandwidth."""
    if a.flop_rate.keys() != b.flop_rate.keys():
        return False
    rates = [(achieved_flop_rate(a, dtype), achieved_flop_rate(b, dtype)) for dtype in a.flop_rate]
    rates.append((a.memory_bandwidth * a.efficiency_of("memory"), b.memory_bandwidth * b.efficiency_of("memory")))
    return all(max(pair) < _LIKE_DEVICES * min(pair) for pair in rates)


def mean_device(devices: Sequence[Device]) -> Device:
    """The device with the geometric mean of every number, and the least memory."""
    first = devices[0]

    def mean(values: Iterable[float]) -> float:
        return math.exp(math.fsum(math.log(max(value, 1e-12)) for value in values) / len(devices))

    def common(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {key: mean(each[key] for each in numbers) for key in numbers[0] if all(key in each for each in numbers)}

    return replace(
        first,
        flop_rate=common([each.flop_rate for each in devices]),
        memory_bandwidth=mean(each.memory_bandwidth for each in devices),
        memory=min(each.memory for each in devices),
        efficiency=common([each.efficiency for each in devices]),
        launch=mean(each.launch for each in devices),
        conv_launch=mean(each.conv_launch for each in devices),
        overlap=math.fsum(each.overlap for each in devices) / len(devices),
    )


def rounded(cluster: Cluster) -> Cluster:
    """Round all numbers but memory sizes to four significant digits, for files that people read and edit."""

    def four_digits(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {key: four_digits(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [four_digits(each, key) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) and key != "memory" else value

    return from_data(four_digits(to_data(cluster)), cluster.name)
