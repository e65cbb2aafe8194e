"""Correct a cluster by what a run measured, and write it into its file.

    compute        c = sum of measured compute / sum of predicted, over ranks       rates / c, launch * c
    communication  t = likewise, over ranks of which more than 1 ms was predicted   bandwidth / t

One factor each: what is wrong with single op classes or latencies, `splitc calibrate` measures.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from splitc import units
from splitc.errors import CostError, LaunchError
from splitc.ir.cluster import Cluster, Device, Link
from splitc.ir.cluster_file import digest, parse_cluster, to_toml
from splitc.ir.phases import Phases
from splitc.ir.plan import Plan

LEAST = 1e-3
"""Seconds of predicted communication below which its error says nothing about a link."""


@dataclass(frozen=True)
class Factors:
    """How many times as long as predicted computing and transfers took; None where too little was predicted."""

    compute: float | None
    communication: float | None

    @property
    def empty(self) -> bool:
        return self.compute is None and self.communication is None


def factors_of(predicted: Sequence[Phases], measured: Sequence[Phases]) -> Factors:
    """By rank; both have one entry for each."""
    pairs = list(zip(predicted, measured, strict=True))
    long = [(p, m) for p, m in pairs if p.communication > LEAST]
    return Factors(
        _ratio(sum(m.compute for _, m in pairs), sum(p.compute for p, _ in pairs)),
        _ratio(sum(m.communication for _, m in long), sum(p.communication for p, _ in long)),
    )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None


def in_words(factors: Factors, cluster: str) -> str:
    """`this machine computes 1.18 times slower than cluster v100-10gbe says, and ...`."""
    found = []
    if factors.compute is not None:
        found.append(f"this machine computes {_times(factors.compute)} cluster {cluster} says")
    if factors.communication is not None:
        source = "it" if found else f"cluster {cluster}"
        found.append(f"its transfers are {_times(factors.communication)} {source} says")
    else:
        least = units.seconds(LEAST)
        found.append(f"no rank was predicted to communicate for more than {least} a step, too little to judge links by")
    return "; ".join(found)


def _times(factor: float) -> str:
    if abs(factor - 1) < 0.005:
        return "as fast as"
    return f"{factor:.2f} times slower than" if factor > 1 else f"{1 / factor:.2f} times faster than"


def to_correct(path: Path, plan: Plan) -> Cluster:
    """The cluster that `--correct path` is about: that of the file, or for a new file the plan's, by its name.

    Raises LaunchError, before anything runs, when it is not the one that the plan was priced on, or when it could not
    be written.
    """
    if path.suffix != ".toml":
        raise LaunchError(f"--correct {path}: a cluster file ends in .toml, or --cluster does not take it for one")
    check_writable("--correct", path)
    if not plan.prediction.phases:
        raise LaunchError(
            f"--correct {path}: plan.json has no predicted phases to compare with; compile the model again"
        )
    cluster = _read(path, plan) if path.exists() else _by_name(path, plan)
    if plan.prediction.priced_on and digest(cluster) != plan.prediction.priced_on:
        raise LaunchError(
            f"--correct {path}: cluster {cluster.name} has other numbers than those that the build was priced on: it "
            f"was corrected or edited since; compile again with --cluster "
            f"{path if path.exists() else plan.prediction.cluster}"
        )
    return cluster


def _read(path: Path, plan: Plan) -> Cluster:
    try:
        cluster = parse_cluster(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--correct {path}: it cannot be read: {error}") from error
    except CostError as error:
        raise LaunchError(f"--correct {error}") from error
    if cluster.name != (priced := plan.prediction.cluster):
        raise LaunchError(
            f"--correct {path} describes cluster {cluster.name}, but the build was planned for cluster {priced}; "
            f"give the file of {priced} or the name of a new file, or compile the model with --cluster {path}"
        )
    return cluster


def _by_name(path: Path, plan: Plan) -> Cluster:
    from splitc.cost_models.clusters.named import load_cluster

    try:
        return load_cluster(plan.prediction.cluster)
    except CostError as error:
        raise LaunchError(
            f"--correct {path}: there is no such file, and {plan.prediction.cluster} is none of the clusters that "
            f"splitc knows by name; give the file that describes it"
        ) from error


def check_writable(option: str, path: Path) -> None:
    """Raises LaunchError when a file cannot be written there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise LaunchError(f"{option} {path}: there is no folder {folder}")
    if path.is_dir():
        raise LaunchError(f"{option} {path}: it is a folder; give a file")
    blocked = next((each for each in (folder, path) if each.exists() and not os.access(each, os.W_OK)), None)
    if blocked is not None:
        raise LaunchError(f"{option} {path}: {blocked} cannot be written to")


def corrected(cluster: Cluster, factors: Factors, world: int) -> Cluster:
    """The cluster on which these factors would be 1: all devices, and the links that `world` ranks have used."""

    def device(given: Device) -> Device:
        if factors.compute is None:
            return given
        return given.slowed(factors.compute)

    def link(given: Link) -> Link:
        return given if factors.communication is None else given.with_bandwidth(given.bandwidth / factors.communication)

    local = cluster.local_link
    one_host = local is not None and world <= (cluster.ranks_per_host or 0)
    outer = (lambda given: given) if one_host else link
    return replace(
        cluster,
        device=device(cluster.device),
        link=outer(cluster.link),
        local_link=None if local is None else link(local),
        unlike=tuple(replace(u, device=device(u.device), link=outer(u.link)) for u in cluster.unlike),
    )


def write_correction(path: Path, cluster: Cluster, factors: Factors, build: str, plan: Plan) -> Path | None:
    """Write the corrected cluster; returns where the file is kept as it was, if there was one.

    A cluster that had no file of its own is named after its new one: it is another cluster now.
    """
    said = [
        f"{what} took {factor:.4g} times as long as predicted"
        for what, factor in (("computing", factors.compute), ("transfers", factors.communication))
        if factor is not None
    ]
    note = f"corrected on {datetime.date.today().isoformat()} by build {build}, plan {plan.hash}: {', '.join(said)}"
    new = corrected(cluster, factors, plan.world)
    new = replace(new, source="; ".join(filter(None, [cluster.source, note])))
    try:
        kept = _keep(path) if path.exists() else None
        if kept is None:
            new = replace(new, name=path.stem)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(to_toml(new), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise LaunchError(f"--correct {path}: cannot write {error.filename or path}: {error.strerror}") from error
    return kept


def _keep(path: Path) -> Path:
    """Copy a file, comments and all, beside itself, over nothing that was kept before: FILE.bak, FILE.bak2, ..."""
    number = 1
    while (kept := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    kept.write_bytes(path.read_bytes())
    return kept


def offer(folder: Path, plan: Plan) -> str:
    """The command that writes the correction."""
    from splitc.cost_models.clusters.named import known_clusters
    from splitc.cost_models.clusters.this_machine import THIS_MACHINE

    if plan.prediction.cluster in (*known_clusters(), THIS_MACHINE):
        file, where = f"{plan.prediction.cluster}-measured.toml", "a new cluster file"
    else:
        file, where = "CLUSTER.toml", f"the file of cluster {plan.prediction.cluster}, with its name for CLUSTER.toml"
    return f"to write this into {where}:\n  splitc run {folder} --measure --correct {file}"
