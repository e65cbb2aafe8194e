"""Correct a cluster by what a run measured.

    compute        c = sum of measured compute / sum of predicted, over ranks       rates / c, launch * c
    communication  t = the same ratio, over ranks with more than 1 ms predicted     bandwidth / t

One factor for computing and one for communication: `splitc calibrate` measures op classes and latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitc.ir.cluster import Cluster, Device, Link
from splitc.runtime.transport.phases import Phases

MIN_SECONDS = 1e-3
"""Seconds of predicted communication below which its error says nothing about a link."""


@dataclass(frozen=True)
class Factors:
    """How many times as long as predicted computing and transfers took; None where that is unknown."""

    compute: float | None
    communication: float | None

    @property
    def empty(self) -> bool:
        return self.compute is None and self.communication is None


def factors_of(predicted: Sequence[Phases], measured: Sequence[Phases]) -> Factors:
    """Return measured over predicted.  Both sequences are indexed by rank."""
    pairs = list(zip(predicted, measured, strict=True))
    significant = [(p, m) for p, m in pairs if p.communication > MIN_SECONDS]
    return Factors(
        _ratio(sum(m.compute for _, m in pairs), sum(p.compute for p, _ in pairs)),
        _ratio(sum(m.communication for _, m in significant), sum(p.communication for p, _ in significant)),
    )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


def corrected(cluster: Cluster, factors: Factors, world: int) -> Cluster:
    """Return the cluster on which both factors would be 1: all devices, and the links that `world` ranks use."""

    def device(given: Device) -> Device:
        return given.slowed(factors.compute or 1.0)

    def link(given: Link) -> Link:
        return given.with_bandwidth(given.bandwidth / (factors.communication or 1.0))

    local = cluster.local_link
    one_host = local is not None and world <= (cluster.ranks_per_host or 0)
    between_hosts = (lambda given: given) if one_host else link
    return replace(
        cluster,
        device=device(cluster.device),
        link=between_hosts(cluster.link),
        local_link=None if local is None else link(local),
        unlike=tuple(replace(u, device=device(u.device), link=between_hosts(u.link)) for u in cluster.unlike),
    )
