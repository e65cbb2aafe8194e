"""Clusters by name: the TOML files in `clusters/`, a user's own file, or this machine, measured."""

from __future__ import annotations

from pathlib import Path

from splitc.cost_models.clusters.this_machine import THIS_MACHINE, measure_this_machine
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import from_data, parse_cluster, to_data
from splitc.ir.names import near_name

_CLUSTERS = Path(__file__).parent


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with splitc, besides "this-machine"."""
    return tuple(sorted(path.stem for path in _CLUSTERS.glob("*.toml")))


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
    if isinstance(cluster, str) and cluster in known_clusters():
        cluster = _CLUSTERS / f"{cluster}.toml"
    elif not isinstance(cluster, Path) and not cluster.endswith(".toml"):
        names = (*known_clusters(), THIS_MACHINE)
        raise CostError(
            f"unknown cluster {cluster!r}; {near_name(cluster, names)}there are {', '.join(names)}; "
            f"or give the path of a .toml file, which `splitc calibrate -o cluster.toml` writes"
        )
    path = Path(cluster)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read the cluster file {path}: {error}") from error
    return parse_cluster(text, str(path))
