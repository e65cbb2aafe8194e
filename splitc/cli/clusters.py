"""`splitc clusters`: the known clusters as a table, as data, or one as a file to start from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace

from tabulate import tabulate

from splitc.cost_models.clusters.files import THIS_MACHINE, known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.clusters.this_machine import measured_before
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import to_data, to_toml
from splitc.report.text import rank_list

_HEADERS = (
    *("", "float32\nTFLOP/s", "half\nTFLOP/s", "memory\nGB", "link\nGbit/s", "latency\nus"),
    *("ranks\non host", "inside\nGbit/s", "world\nat most", "device"),
)


def clusters(args: argparse.Namespace) -> int:
    """Print the clusters asked for as files, or all as a table or as JSON."""
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
