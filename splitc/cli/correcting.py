"""`splitc run --correct`: find the cluster that is to be corrected, and write the correction into its file."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

from splitc.cli.files import check_writable, write_file
from splitc.cost_models.calibration.correction import Factors
from splitc.cost_models.calibration.learning import Run, fit, slowed
from splitc.cost_models.calibration.record import runs_on
from splitc.cost_models.clusters.files import THIS_MACHINE, known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import CostError, LaunchError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import digest, to_toml
from splitc.ir.plan import Plan


def cluster_to_correct(path: Path, plan: Plan) -> Cluster:
    """The cluster that `--correct path` corrects: the one in the file, or for a new file the plan's, by its name.

    Raises LaunchError when it is not the cluster that the plan was priced on, or when the file cannot be written.
    """
    if path.suffix != ".toml":
        raise LaunchError(f"--correct {path}: a cluster file ends in .toml, or --cluster does not take it for one")
    check_writable("--correct", path)
    if not plan.prediction.phases:
        raise LaunchError(
            f"--correct {path}: plan.json has no predicted phases to compare with; compile the model again"
        )
    priced = plan.prediction.cluster  # its name
    if not path.exists() and not _is_known(plan):
        raise LaunchError(
            f"--correct {path}: there is no such file, and {priced} is none of the clusters that splitc knows by name; "
            f"give the file that describes it"
        )
    source = path if path.exists() else priced
    try:
        cluster = load_cluster(source)
    except CostError as error:
        raise LaunchError(f"--correct {error}") from error
    known = plan.prediction.priced_on
    if digest(cluster) == known:
        return cluster
    if cluster.name != priced:
        raise LaunchError(
            f"--correct {path} describes cluster {cluster.name}, but the build was planned for cluster {priced}; "
            f"give the file of {priced} or the name of a new file, or compile the model with --cluster {path}"
        )
    if known:
        raise LaunchError(
            f"--correct {path}: cluster {cluster.name} has other numbers than those that the build was priced on: it "
            f"was corrected or edited since; compile again with --cluster {source}"
        )
    return cluster


def _is_known(plan: Plan) -> bool:
    """Whether splitc has the cluster that a plan was priced on, and not another one by that name."""
    name, numbers = plan.prediction.cluster, plan.prediction.priced_on
    return name == THIS_MACHINE or (name in known_clusters() and numbers in ("", digest(load_cluster(name))))


def write_correction(path: Path, run: Run, factors: Factors, build: str, plan: Plan) -> Path | None:
    """Write the cluster, fitted to this run and all before; returns the backup of the file, if there was one.

    A cluster in a new file is named after that file, since it is another cluster now.
    """
    took = [
        f"{what} took {factor:.4g} times as long as predicted"
        for what, factor in (("computing", factors.compute), ("transfers", factors.communication))
        if factor is not None
    ]
    note = f"corrected on {datetime.date.today().isoformat()} by build {build}, plan {plan.hash}: {', '.join(took)}"
    source = path if path.exists() else plan.prediction.cluster
    cluster = load_cluster(source, learns=False)
    new = slowed(cluster, fit([*runs_on(source, cluster), run]))
    new = replace(new, source="; ".join(filter(None, [cluster.source, note])))
    backup = _back_up(path) if path.exists() else None
    write_file("--correct", path, to_toml(new if backup else replace(new, name=path.stem)))
    return backup


def _back_up(path: Path) -> Path:
    """Copy a file to the first free name of FILE.bak, FILE.bak2, ..."""
    number = 1
    while (kept := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    try:
        kept.write_bytes(path.read_bytes())
    except OSError as error:
        raise LaunchError(f"--correct {path}: cannot write {error.filename or kept}: {error.strerror}") from error
    return kept


def correction_command(folder: Path, plan: Plan) -> str:
    """The command that writes the correction."""
    if _is_known(plan):
        file, where = f"{plan.prediction.cluster}-measured.toml", "a new cluster file"
    else:
        file, where = "CLUSTER.toml", f"the file of cluster {plan.prediction.cluster}, with its name for CLUSTER.toml"
    return f"to write this into {where}:\n  splitc run {folder} --measure --correct {file}"
