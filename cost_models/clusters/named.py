"""Clusters by name: the TOML files in `clusters/`, a user's own file, or this machine, measured."""

from __future__ import annotations

from pathlib import Path

from splitc.cost_models.calibration.record import fitted
from splitc.cost_models.clusters.files import THIS_MACHINE, cluster_files, known_clusters
from splitc.cost_models.clusters.this_machine import measure_this_machine
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import from_data, parse_cluster, to_data


def is_this_machine(cluster: str | Path | Cluster | None) -> bool:
    """Whether this names the machine that the process is on."""
    return cluster is None or cluster == THIS_MACHINE


def load_cluster(cluster: str | Path | Cluster | None = None, learns: bool = True) -> Cluster:
    """A known name, a `.toml` file, a Cluster, or this machine.

    None and "this-machine" mean this machine; it is measured once, then cached.
    learns: a user's file and this machine are fitted to what ran there (`calibration/record.py`).

    Raises CostError for an unknown name, a file that is not there, and numbers that are missing or
    make no sense.
    """
    if isinstance(cluster, Cluster):
        return from_data(to_data(cluster), f"cluster {cluster.name}")
    if cluster is None or is_this_machine(cluster):
        here = measure_this_machine()
        return fitted(here, None) if learns else here
    paths = cluster_files(cluster)
    try:
        texts = [path.read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read the cluster file {cluster}: {error}") from error
    own = [f'name = "{cluster}"\n'] if len(paths) > 1 else []
    found = parse_cluster("".join([*own, *texts]), " and ".join(map(str, paths)))
    is_known = cluster in known_clusters()  # they describe the machines of others
    return found if is_known or not learns or found.learned is not None else fitted(found, cluster)
