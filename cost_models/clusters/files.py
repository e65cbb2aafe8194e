"""The clusters that come with splitc, and the files of a cluster by name.  Quick to load: no torch.

`rtx3090-10gbe` is the device in `hosts/rtx3090.toml` with the link in `networks/10gbe.toml`.
"""

from __future__ import annotations

import re
from os.path import isfile
from pathlib import Path

from splitc.errors import CostError
from splitc.ir.names import near_name

THIS_MACHINE = "this-machine"
_CLUSTERS = Path(__file__).parent


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with splitc, besides "this-machine"."""
    return tuple(sorted(_files(), key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(4), name)))


def _files() -> dict[str, tuple[Path, ...]]:
    """Name -> the file of the cluster, or those of its device and of its link."""
    hosts, networks = (tuple((_CLUSTERS / part).glob("*.toml")) for part in ("hosts", "networks"))
    files: dict[str, tuple[Path, ...]] = {path.stem: (path,) for path in _CLUSTERS.glob("*.toml")}
    return files | {f"{host.stem}-{network.stem}": (host, network) for host in hosts for network in networks}


def cluster_files(cluster: str | Path) -> tuple[Path, ...]:
    """The file of a cluster, or those of its device and of its link.  Raises CostError where there is none."""
    if not isinstance(cluster, str | Path):
        raise CostError(f"cluster is {cluster!r:.60}; give a known name, the path of a .toml file, or a Cluster")
    paths = (Path(cluster),) if isinstance(cluster, Path) else _files().get(cluster, (Path(cluster),))
    if isinstance(cluster, str) and not paths[-1].name.endswith(".toml"):
        names = (*known_clusters(), THIS_MACHINE)
        raise CostError(
            f"unknown cluster {cluster!r}; {near_name(cluster, names)}there are {', '.join(names)}; "
            f"or give the path of a .toml file, which `splitc calibrate -o cluster.toml` writes"
        )
    if not isfile(paths[-1]):
        raise CostError(f"cannot read the cluster file {cluster}: there is no such file")
    return paths
