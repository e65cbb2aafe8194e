"""`splitc clusters`: the known clusters as a table, as data, or one as a file to start from."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tabulate import tabulate

from splitc import units
from splitc.cost_models.calibration.learning import fit, priced
from splitc.cost_models.calibration.record import runs_on
from splitc.cost_models.clusters.files import THIS_MACHINE, known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.clusters.this_machine import measured_before
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import to_data, to_toml
from splitc.report.tables import rank_list, short, table

_OF_RUN = ("plan", "strategy", "world", "predicted", "measured", "elsewhere")
_HEADERS = (
    *("", "float32\nTFLOP/s", "half\nTFLOP/s", "memory\nGB", "link\nGbit/s", "latency\nus"),
    *("ranks\non host", "inside\nGbit/s", "world\nat most", "device"),
)


def clusters(args: argparse.Namespace) -> int:
    """Print the clusters asked for as files, or all as a table or as JSON; or how accurate their prices are."""
    if args.accuracy:
        print(json.dumps(_ran(args.names), indent=1) if args.json else _accuracy(args.names))
        return 0
    if args.names and not args.json:
        print("\n".join(to_toml(load_cluster(name)) for name in args.names), end="")
        return 0
    here = measured_before()
    found = [load_cluster(name) for name in args.names or known_clusters()]
    found += [here] if here is not None and not args.names else []
    if args.json:
        print(json.dumps({"schema": 1, "clusters": [to_data(cluster) for cluster in found]}, indent=1))
        return 0
    rows = [row for cluster in found for row in _rows(cluster)]
    print(tabulate(rows, _HEADERS, disable_numparse=True, colalign=("left", *["right"] * 8, "left")))
    print("\n*  one link, which the ranks of a host share\nsplitc clusters NAME  prints one as a file, with its source")
    if here is None:
        print(f"{THIS_MACHINE}  is not measured yet; any command without --cluster measures it, in about 5 s")
    return 0


def _ran(names: Sequence[str]) -> dict[str, Any]:
    """What ran on clusters, as data for --json, schema 1; without names on those where something did."""
    here = [THIS_MACHINE] * (measured_before() is not None)
    found = {}
    for name in names or (*known_clusters(), *here):
        cluster = load_cluster(name, learns=False)
        runs, now = runs_on(name, cluster), fit(runs_on(name, cluster))
        rows = []
        for run in runs:
            of_run = {key: getattr(run, key) for key in _OF_RUN}
            rows.append({"name": run.name or run.plan, **of_run, "fitted": priced(run, now)})
        if rows or names:
            found[name] = {"factors": now, "runs": rows}
    return {"schema": 1, "clusters": found}


def _accuracy(names: Sequence[str]) -> str:
    """The prices of what ran, when it was planned and by the cluster fitted to all of it, beside what it took."""
    parts = []
    for name, told in _ran(names)["clusters"].items():
        rows, errors = [], list[tuple[float, float]]()
        for run in told["runs"]:
            took, own = run["measured"], (run["predicted"], run["fitted"])
            signed = [(each - took) / took for each in own]
            errors += [(abs(signed[0]), abs(signed[1]))] * (not run["elsewhere"])
            shown = [f"{units.seconds(each)} {error:+.0%}" for each, error in zip(own, signed, strict=True)]
            what = [short(run["name"], 20), short(run["strategy"], 18), str(run["world"]), units.seconds(took)]
            rows.append([*what, *(["not this machine", ""] if run["elsewhere"] else shown)])
        lines = [name, table("|strategy|#ranks|#measured|#predicted|#fitted", rows)]
        for when, of in zip(("predicted before it ran", "by the fit"), zip(*errors, strict=True), strict=False):
            lines.append(f"{when}: median error {statistics.median(of):.1%}, worst {max(of):.1%}")
        parts.append("\n".join(lines if rows else [name, "nothing was measured on it yet: splitc run BUILD --measure"]))
    return "\n\n".join(parts) or "nothing was measured yet: splitc run BUILD --measure"


def _rows(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """A row of the cluster, and one for each kind of unlike ranks."""
    device, link, local = cluster.device, cluster.link, cluster.local_link
    ranks = "all" if cluster.ranks_share_device else cluster.ranks_per_host or 1
    half = max(device.flop_rate.get(dtype, 0.0) for dtype in ("bfloat16", "float16"))
    yield (
        cluster.name,
        *(_number(rate * 1e-12) for rate in (device.flop_rate.get("float32", 0.0), half)),
        _number(device.memory * 1e-9),
        _number(link.bandwidth * 8e-9) + "*" * link.shared,
        _number(link.latency * 1e6),
        *(str(ranks), _number(local.bandwidth * 8e-9) if local else "", str(cluster.world or ""), device.name),
    )
    for each in cluster.unlike:
        name = f"- {rank_list(each.ranks)}"
        yield from _rows(replace(cluster, name=name, device=each.device, link=each.link, world=None, unlike=()))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else ""
