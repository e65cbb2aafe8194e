"""`splitc doctor`: measure all pairs of hosts before training, and say what is wrong there or in the cluster file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from splitc import units
from splitc.cli.example_input import free_memory
from splitc.cli.files import filled
from splitc.cli.hosts import parse_hosts, run_on_hosts
from splitc.cost_models.calibration.pairs import Pair, measure_pairs
from splitc.cost_models.clusters.files import cluster_files
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import to_toml
from splitc.ir.device import Link
from splitc.runtime.launch.failures import guarded
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.devices import host
from splitc.runtime.transport.distributed import init
from splitc.runtime.transport.started import is_rank
from splitc.version import __version__

_SLOWER, _FASTER, _SHARING = 0.8, 1.5, 1.3  # factors of a bandwidth from which it is another one
_LATE = 5e-4  # seconds of latency, beyond three times what is expected
_CLOCK, _ROOM = 0.5, 1e9  # seconds that clocks may differ by; bytes of memory and disk that are too few


def doctor(args: argparse.Namespace) -> int:
    """Measure and compare; returns 1 where something is wrong.  Raises LaunchError before any process starts."""
    if args.cluster is not None:
        cluster_files(args.cluster)
    if args.hosts and args.ranks:
        raise LaunchError("--ranks starts processes on this machine, --hosts a:2,b on others; give one of them")
    options = ["--budget", str(args.budget), *["--json"] * args.json]
    if is_rank():
        codes: list[int] = []
        guarded(lambda: codes.append(_as_rank(args)))
        return codes[0]
    if args.hosts:
        return _on_hosts(args, options)
    options += ["--cluster", args.cluster] if args.cluster else []
    return torchrun(["-m", "splitc.cli", "doctor", *options], args.ranks or 2).returncode and 1


def _on_hosts(args: argparse.Namespace, options: Sequence[str]) -> int:
    numbers = [name.rpartition(":")[2] for name in args.hosts.split(",")]
    hosts = parse_hosts(args.hosts, sum(int(number) if number.isdecimal() else 1 for number in numbers))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "launch.py").write_text(filled("doctor.txt"))
        if args.cluster:
            (Path(folder) / "cluster.toml").write_text(to_toml(load_cluster(args.cluster)), encoding="utf-8")
        return run_on_hosts(Path(folder), "doctor", hosts, options) and 1


def _as_rank(args: argparse.Namespace) -> int:
    transport = init()
    hosts = transport.all_gather_objects(facts(transport))
    pairs = measure_pairs(transport, args.budget)
    code = 0
    if transport.rank == 0:
        cluster = load_cluster(args.cluster) if args.cluster else None
        found = list(problems(hosts, pairs, cluster))
        code = int(bool(found))
        data = {"schema": 1, "hosts": hosts, "pairs": list(map(asdict, pairs)), "problems": found}
        print(json.dumps(data, indent=1) if args.json else "\n".join(report(hosts, pairs, found)), flush=True)
    transport.barrier()
    transport.close()
    return code


def facts(transport: Transport) -> dict[str, Any]:
    """What this rank's host has; memory and disk in bytes that are free."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {
        "host": host(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME") or "of the host name",
        "backend": "nccl" if transport.waits_hold_the_stream else "gloo",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "splitc": __version__,
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "memory": int(free_memory()),
        "disk": shutil.disk_usage(Path.cwd()).free,
    }


# -- what is wrong -----------------------------------------------------------------------------------------------------


def problems(hosts: Sequence[Mapping[str, Any]], pairs: Sequence[Pair], cluster: Cluster | None) -> Iterator[str]:
    """Plain lines; hosts: the facts of each rank."""
    names = _names(hosts)
    if cluster is not None and cluster.world is not None and cluster.world < len(hosts):
        yield f"the cluster file has {cluster.world} devices, here are {len(hosts)} ranks"
    for rank, each in enumerate(hosts):
        for what in ("python", "torch", "splitc", "gpus"):
            if each[what] != hosts[0][what]:
                yield f"{names[rank]} has {what} {each[what] or 'none'}, {names[0]} {hosts[0][what] or 'none'}"
        for what in ("memory", "disk"):
            if each[what] < _ROOM:
                yield f"{names[rank]} has {units.nbytes(each[what])} of {what} free"
    for pair in pairs:
        a, b = pair.ranks
        if a == 0 and abs(pair.ahead) > _CLOCK:
            yield f"the clock of {names[b]} is {pair.ahead:+.1f} s from that of {names[a]}"
        link, says = _expected(pair, pairs, hosts, cluster)
        between = f"{names[a]} <-> {names[b]}"
        if not _SLOWER <= pair.bandwidth / link.bandwidth <= _FASTER:
            beside = ", beside no other pair" if pair.beside is not None else ""
            yield f"{between}: {units.bandwidth(pair.bandwidth)}{beside}; {says} {units.bandwidth(link.bandwidth)}"
        if pair.latency > 3 * link.latency + _LATE:
            yield f"{between}: {units.seconds(pair.latency)} a message; {says} {units.seconds(link.latency)}"


def _expected(
    pair: Pair, pairs: Sequence[Pair], hosts: Sequence[Mapping[str, Any]], cluster: Cluster | None
) -> tuple[Link, str]:
    """What the cluster file says of a pair; without one, what most pairs like it have."""
    of = [each["host"] for each in hosts]
    ranks = pair.ranks
    if cluster is not None:
        if per_host := cluster.ranks_per_host:  # of which not all may have been started
            order = list(dict.fromkeys(of))
            a, b = (order.index(of[rank]) * per_host + of[:rank].count(of[rank]) for rank in ranks)
            ranks = (a, b)
        return cluster.link_across(ranks[:1], ranks[1:]), "the cluster file says"
    like = [each for each in pairs if len({of[k] for k in each.ranks}) == len({of[k] for k in ranks})]
    bandwidth, latency = (statistics.median(getattr(each, name) for each in like) for name in ("bandwidth", "latency"))
    return Link(bandwidth, latency), "most pairs have"


def _names(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    of = [each["host"] for each in hosts]
    return [f"{name} rank {rank}" if of.count(name) > 1 else name for rank, name in enumerate(of)]


# -- what is printed ---------------------------------------------------------------------------------------------------


def report(hosts: Sequence[Mapping[str, Any]], pairs: Sequence[Pair], found: Sequence[str]) -> Iterator[str]:
    """The hosts, the pairs, the slowest first, which of them share a line, and what is wrong."""
    names = _names(hosts)
    for name, each in zip(names, hosts, strict=True):
        gpus = ", ".join(each["gpus"]) or "no GPU"
        yield f"{name}: {each['backend']} on {each['interface']}; Python {each['python']}, torch {each['torch']}"
        yield f"  {gpus}; free: {units.nbytes(each['memory'])} of memory, {units.nbytes(each['disk'])} of disk"
    for pair in sorted(pairs, key=lambda each: each.bandwidth):
        a, b = pair.ranks
        clock = f", clock {1e3 * pair.ahead:+.1f} ms" if a == 0 else ""
        shared = pair.beside is not None and pair.bandwidth > _SHARING * pair.beside
        note = f" ({units.bandwidth(pair.beside or 0)} beside other pairs: they share a line)" if shared else ""
        shown = f"{units.bandwidth(pair.bandwidth)}{note}, {units.seconds(pair.latency)}{clock}"
        yield f"{names[a]} <-> {names[b]}: {shown}"
    yield ""
    yield from (f"wrong: {line}" for line in found)
    if not found:
        yield "nothing is wrong"
