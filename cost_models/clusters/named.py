"""Clusters by name: the TOML files in `clusters/`, a user's own file, or this machine, measured.

`rtx3090-10gbe` is the device in `hosts/rtx3090.toml` with the link in `networks/10gbe.toml`.
"""

from __future__ import annotations

import re
from pathlib import Path

from splitc.cost_models.clusters.this_machine import THIS_MACHINE, measure_this_machine
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import from_data, parse_cluster, to_data
from splitc.ir.names import near_name

_CLUSTERS = Path(__file__).parent


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with splitc, besides "this-machine"."""
    return tuple(sorted(_files(), key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(4), name)))


def _files() -> dict[str, tuple[Path, ...]]:
    """Name -> the file of the cluster, or those of its device and of its link."""
    hosts, networks = (tuple((_CLUSTERS / part).glob("*.toml")) for part in ("hosts", "networks"))
    files: dict[str, tuple[Path, ...]] = {path.stem: (path,) for path in _CLUSTERS.glob("*.toml")}
    return files | {f"{host.stem}-{network.stem}": (host, network) for host in hosts for network in networks}


def load_cluster(cluster: str | Path | Cluster | None = None) -> Cluster:
    """A known name, a `.toml` file, a Cluster, or this machine.

    None and "this-machine" mean this machine; it is measured once, then cached.

    Raises CostError for an unknown name, a file that is not there, and numbers that are missing or
    make no sense.
    """
    if isinstance(cluster, Cluster):
        return from_data(to_data(cluster), f"cluster {cluster.name}")
    if cluster is None or cluster == THIS_MACHINE:
        return measure_this_machine()
    paths = (Path(cluster),) if isinstance(cluster, Path) else _files().get(cluster, (Path(cluster),))
    if isinstance(cluster, str) and not paths[-1].name.endswith(".toml"):
        names = (*known_clusters(), THIS_MACHINE)
        raise CostError(
            f"unknown cluster {cluster!r}; {near_name(cluster, names)}there are {', '.join(names)}; "
            f"or give the path of a .toml file, which `splitc calibrate -o cluster.toml` writes"
        )
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read the cluster file {cluster}: {error}") from error
    own = [f'name = "{cluster}"\n'] if len(paths) > 1 else []
    return parse_cluster("".join([*own, *texts]), " and ".join(map(str, paths)))
