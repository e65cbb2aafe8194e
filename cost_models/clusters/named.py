"""Clusters by name: the TOML files in `clusters/`, a user's own file, or this machine, measured."""

from __future__ import annotations

from pathlib import Path

from splitc.cost_models.clusters.files import THIS_MACHINE, cluster_files
from splitc.cost_models.clusters.this_machine import measure_this_machine
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import from_data, parse_cluster, to_data


def is_this_machine(cluster: str | Path | Cluster | None) -> bool:
    """Whether this names the machine that the process is on."""
    return cluster is None or cluster == THIS_MACHINE


def load_cluster(cluster: str | Path | Cluster | None = None) -> Cluster:
    """A known name, a `.toml` file, a Cluster, or this machine.

    None and "this-machine" mean this machine; it is measured once, then cached.

    Raises CostError for an unknown name, a file that is not there, and numbers that are missing or
    make no sense.
    """
    if isinstance(cluster, Cluster):
        return from_data(to_data(cluster), f"cluster {cluster.name}")
    if cluster is None or is_this_machine(cluster):
        return measure_this_machine()
    paths = cluster_files(cluster)
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read the cluster file {cluster}: {error}") from error
    own = [f'name = "{cluster}"\n'] if len(paths) > 1 else []
    return parse_cluster("".join([*own, *texts]), " and ".join(map(str, paths)))
