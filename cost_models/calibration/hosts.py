"""The cluster of ranks that are running, where they are on several hosts and nobody has described it.

Loopback, which one machine measures of itself, is no price of a network.
"""

from __future__ import annotations

import os
from collections import Counter

from splitc.cost_models.calibration.calibrate import calibrate
from splitc.cost_models.calibration.rank_timer import Progress, no_progress
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.devices import host

NAME = "these-hosts"
_BUDGET = 8.0  # seconds, about
_GIVE = "give cluster=, a known cluster or a file that `splitc calibrate` wrote on these hosts"


def measured_among(transport: Transport, progress: Progress = no_progress) -> Cluster | None:
    """The cluster that these ranks run on, measured in some seconds; None where all are on one host.  Collective.

    Raises LaunchError where the hosts cannot be measured: it asks for the cluster.
    """
    names = transport.all_gather_objects(host())
    counts = Counter(names)
    if len(counts) == 1:
        return None
    alike, per_host = len(set(counts.values())) == 1, len(names) // len(counts)
    if not alike or [name for name in counts for _ in range(per_host)] != names:
        on = ", ".join(f"{number} on {name}" for name, number in counts.items())
        raise LaunchError(
            f"the prices of a plan need the network, which ranks on unequal hosts do not show ({on}); {_GIVE}"
        )
    progress(
        f"measuring {len(counts)} hosts and the network between them for about {_BUDGET:g} s; to leave it out, {_GIVE}"
    )
    return calibrate(transport, _BUDGET, name=NAME).cluster


def require_described(what: str) -> None:
    """Raise LaunchError where torchrun started this process with others on several hosts: it cannot measure them."""
    here, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here and world and int(here) < int(world):
        raise LaunchError(
            f"{what} prices plans on the network between the hosts, and one process cannot measure it; {_GIVE}"
        )
