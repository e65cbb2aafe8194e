"""A cluster as TOML: written by a user, or by `splitc calibrate`.

name = "v100-10gbe"
source = "where the numbers are from"
world = 11                    # devices there are; leave it out when there is no limit
ranks_per_host = 8            # leave it out when every rank is a host of its own
ranks_per_site = 16           # leave it out when there is one site

[device]
name = "Tesla V100 16 GB"
memory_bandwidth = 900e9      # bytes/s
memory = 16e9                 # bytes
launch = 5e-6                 # seconds for one op
flop_rate.float32 = 15.7e12   # peak FLOP/s; one line for each dtype
efficiency.matmul = 0.5       # part of the peak that is reached
efficiency.conv_backward = 0.4
efficiency.memory = 0.75
efficiency.conv_moved = 0.2   # part of the memory bandwidth that the bytes of convolutions reach
conv_launch = 10e-6           # additional seconds for a convolution
overlap = 1.0                 # part of an op's memory traffic that hides behind its arithmetic
jitter = 0.0                  # seconds: variance of the time of a computation for each second of it

[link]                        # of a rank to all others; with a local_link to those of other hosts
bandwidth = 1.25e9            # bytes/s of one direction
latency = 30e-6               # seconds for one message
duplex = true                 # both directions at once at full bandwidth
shared = false                # one link for all ranks of a host
processor = 0.0               # seconds of computing that a byte takes from the rank that sends or receives it
message_processor = 0.0       # seconds of computing that a message takes from either rank besides
all_reduce.bandwidth = 0.9e9  # what a collective of the backend reaches, where it was measured
all_reduce.latency = 60e-6

[local_link]                  # between the ranks of a host
bandwidth = 150e9
latency = 5e-6

[site_link]                   # between ranks of different sites, where ranks_per_site is given too
bandwidth = 625e3
latency = 50e-3
shared = true                 # one line for all ranks of a site

[[unlike]]                    # ranks that differ, and in what
ranks = [2, 3]
device.memory = 32e9
link.bandwidth = 3.1e9

What `unlike` leaves out is as for the other ranks.  A flop_rate or efficiency table in it replaces the whole table of
the other ranks; the rates of collectives are not inherited by a link with a bandwidth or latency of its own.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import tomli_w

from splitc.errors import CostError, bullets
from splitc.ir.cluster import Cluster
from splitc.ir.decode import Problem, decode, hints_of
from splitc.ir.device import COLLECTIVES

_HEADER = "# Units: FLOP/s, bytes/s, bytes and seconds.\n"


def to_toml(cluster: Cluster) -> str:
    """Text that `parse_cluster` reads back to an equal cluster."""
    return _HEADER + tomli_w.dumps(to_data(cluster))


def to_data(cluster: Cluster) -> dict[str, Any]:
    """The tables of a cluster file; `from_data` reads them back to an equal cluster."""
    data = {key: value for key, value in asdict(cluster).items() if value not in (None, ())}
    if cluster.unlike:
        data["unlike"] = [{**each, "ranks": list(each["ranks"])} for each in data["unlike"]]
    for table in (data, *data.get("unlike", ())):
        table["device"] = _floats(_known(table["device"]))
        for key in {"link", "local_link", "site_link"} & table.keys():
            collectives = table[key].pop("collectives")
            table[key] = _floats(_known(table[key]) | collectives)
    return data


def _known(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without what was not measured, as files from before have it."""
    return {key: value for key, value in table.items() if value or key not in ("jitter", "message_processor")}


def _floats(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all numbers as floats, those of tables in it too."""
    read: dict[type, Callable[[Any], Any]] = {dict: _floats, int: float}
    return {key: read.get(type(value), lambda same: same)(value) for key, value in table.items()}


def digest(cluster: Cluster) -> str:
    """Twelve hex digits of the numbers that prices depend on, which names, sources and memory sizes do not change."""
    data = to_data(replace(cluster, source="", learned=None)) | {"name": ""}
    for table in (data, *data.get("unlike", ())):
        table["device"] |= {"name": "", "memory": 1.0}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def base_digest(cluster: Cluster) -> str:
    """The digest of a cluster as it was before runs changed its numbers."""
    return digest(cluster) if cluster.learned is None else cluster.learned.base


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster that a TOML text describes; `where` names the text in errors.

    Raises CostError with every missing number, unknown key and value out of range.
    """
    try:
        return from_data(tomllib.loads(text), where)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"{where} is no TOML file: {error}") from error


def from_data(data: Mapping[str, Any], where: str) -> Cluster:
    """The cluster that the tables of a file describe; raises as `parse_cluster`."""
    unlike = data.get("unlike", ())
    if isinstance(unlike, list | tuple):
        data = {**data, "unlike": [_inheriting(each, data) for each in unlike]} if unlike else data
    values, found = decode(hints_of(Cluster), data, needed=("name", "device", "link"))
    usual = {(problem.path, problem.what) for problem in found}
    new = [each for each in found if each.path[0] != "unlike" or (each.path[2:], each.what) not in usual]
    problems = [*map(_told, new), *_sense(data, values)]
    if problems:
        raise CostError(bullets(f"{where} does not describe a cluster:", problems))
    unlike = tuple(replace(each, ranks=tuple(sorted(each.ranks))) for each in values.get("unlike", ()))
    return Cluster(**{**values, "unlike": unlike})


def _inheriting(table: Any, data: Mapping[str, Any]) -> Any:
    """A table of `unlike` with what it does not give of the device and link of the other ranks."""
    if not isinstance(table, Mapping):
        return table
    inherited = {}
    for key in ("device", "link"):
        usual, own = data.get(key), table.get(key, {})
        if isinstance(usual, Mapping) and isinstance(own, Mapping):
            measured = COLLECTIVES if key == "link" and {"bandwidth", "latency"} & own.keys() else ()
            inherited[key] = {name: value for name, value in usual.items() if name not in measured} | {**own}
    return {**table, **inherited}


def _told(problem: Problem) -> str:
    """`device.memory is missing; measure it with ...`."""
    path, what = problem
    named = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")
    if what.startswith("is missing") and path[-1] not in ("name", "ranks"):
        rate = "; give flop_rate.float32 in FLOP/s, or" if path[-1] == "flop_rate" else ";"
        what = f"is missing{rate} measure it with `splitc calibrate`"
    return f"{named} {what}"


def _sense(data: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Values that contradict each other."""
    local, world = values.get("local_link"), values.get("world")
    ranks = [rank for each in values.get("unlike", ()) for rank in each.ranks]
    if ("local_link" in data) != ("ranks_per_host" in data):
        yield "local_link and ranks_per_host belong together: give both, or neither"
    if ("site_link" in data) != ("ranks_per_site" in data):
        yield "site_link and ranks_per_site belong together: give both, or neither"
    if (each := values.get("ranks_per_site", 0)) % (host := values.get("ranks_per_host") or 1):
        yield f"ranks_per_site is {each}, which hosts of {host} ranks do not make up"
    if local is not None and local.shared:
        yield "local_link.shared is true; give the bandwidth that a rank has while all of its host send"
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        yield f"unlike names ranks more than once: {', '.join(map(str, twice))}"
    if world is not None and any(rank >= world for rank in ranks):
        yield f"unlike names rank {max(ranks)}; the cluster has ranks 0 to {world - 1}"
