"""A cluster as TOML: written by a user, or by `splitc calibrate`.

name = "v100-10gbe"
source = "where the numbers are from"
world = 11                    # devices there are; leave it out when there is no limit
ranks_per_host = 8            # leave it out when every rank is a host of its own

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

[link]                        # of a rank to all others; with a local_link to those of other hosts
bandwidth = 1.25e9            # bytes/s of one direction
latency = 30e-6               # seconds for one message
duplex = true                 # both directions at once at full bandwidth
shared = false                # one link for all ranks of a host
processor = 0.0               # seconds of computing that a byte takes from the rank that sends or receives it
all_reduce.bandwidth = 0.9e9  # what a collective of the backend reaches, where it was measured
all_reduce.latency = 60e-6

[local_link]                  # between the ranks of a host
bandwidth = 150e9
latency = 5e-6

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
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import tomli_w

from splitc.errors import CostError, bullets
from splitc.ir.cluster import COLLECTIVES, DTYPES, EFFICIENCIES, Cluster, Device, Link, Rate, Unlike
from splitc.ir.names import near_name

_HEADER = "# Units: FLOP/s, bytes/s, bytes and seconds.\n"
_REQUIRED = ("matmul", "memory")


def to_toml(cluster: Cluster) -> str:
    """Text that `parse_cluster` reads back to an equal cluster."""
    return _HEADER + tomli_w.dumps(to_data(cluster))


def to_data(cluster: Cluster) -> dict[str, Any]:
    """The tables of a cluster file; `from_data` reads them back to an equal cluster."""
    data = {key: value for key, value in asdict(cluster).items() if value not in (None, ())}
    if cluster.unlike:
        data["unlike"] = [{**each, "ranks": list(each["ranks"])} for each in data["unlike"]]
    for table in (data, *data.get("unlike", ())):
        table["device"] = _floats(table["device"])
        for key in {"link", "local_link"} & table.keys():
            collectives = table[key].pop("collectives")
            table[key] = _floats(table[key] | collectives)
    return data


def _floats(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all numbers as floats, those of tables in it too."""
    read: dict[type, Callable[[Any], Any]] = {dict: _floats, int: float}
    return {key: read.get(type(value), lambda same: same)(value) for key, value in table.items()}


def digest(cluster: Cluster) -> str:
    """Twelve hex digits of the numbers that prices depend on, which names, sources and memory sizes do not change."""

    def priced(device: Device) -> Device:
        return replace(device, name="", memory=1.0)

    unlike = tuple(replace(each, device=priced(each.device)) for each in cluster.unlike)
    bare = replace(cluster, name="", source="", device=priced(cluster.device), unlike=unlike)
    return hashlib.sha256(json.dumps(to_data(bare), sort_keys=True).encode()).hexdigest()[:12]


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
    problems: list[str] = []
    top = _Table(data, "", problems)
    local = _link(top.table("local_link")) if "local_link" in data else None
    if ("local_link" in data) != ("ranks_per_host" in data):
        problems.append("local_link and ranks_per_host belong together: give both, or neither")
    if local is not None and local.shared:
        problems.append("local_link.shared is true; give the bandwidth that a rank has while all of its host send")
    cluster = Cluster(
        name=top.name(),
        device=_device(top.table("device")),
        link=_link(top.table("link")),
        world=top.count("world", None),
        ranks_share_device=top.flag("ranks_share_device", False),
        source=top.value("source", lambda value: isinstance(value, str), "a text", ""),
        cores=top.count("cores", 1),
        local_link=local,
        ranks_per_host=top.count("ranks_per_host", None),
        unlike=tuple(_unlike(table, top) for table in top.tables("unlike")),
    )
    ranks = [rank for each in cluster.unlike for rank in each.ranks]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        problems.append(f"unlike names ranks more than once: {', '.join(map(str, twice))}")
    if cluster.world is not None and any(rank >= cluster.world for rank in ranks):
        problems.append(f"unlike names rank {max(ranks)}; the cluster has ranks 0 to {cluster.world - 1}")
    top.refuse_others(*_keys(Cluster))
    if problems:
        raise CostError(bullets(f"{where} does not describe a cluster:", list(dict.fromkeys(problems))))
    return cluster


def _keys(kind: type) -> list[str]:
    return [each.name for each in fields(kind) if each.name != "collectives"]


def _device(table: _Table) -> Device:
    rates, efficiency = table.table("flop_rate"), table.table("efficiency")
    if not rates.data:
        table.problems.append(
            f"{table.path}flop_rate has no number; give flop_rate.float32 in FLOP/s, or measure it with "
            f"`splitc calibrate`"
        )
    table.refuse_others(*_keys(Device))
    rates.refuse_others(*DTYPES)
    efficiency.refuse_others(*EFFICIENCIES)
    parts = [op for op in EFFICIENCIES if op in _REQUIRED or op in efficiency.data]
    return Device(
        name=table.name(),
        flop_rate={dtype: rates.number(dtype) for dtype in DTYPES if dtype in rates.data},
        memory_bandwidth=table.number("memory_bandwidth"),
        memory=table.number("memory"),
        efficiency={op: efficiency.number(op, most=1.0) for op in parts},
        launch=table.number("launch", zero=True),
        conv_launch=table.number("conv_launch", zero=True, default=0.0),
        overlap=table.number("overlap", zero=True, most=1.0, default=1.0),
    )


def _link(table: _Table) -> Link:
    table.refuse_others(*_keys(Link), *COLLECTIVES)
    measured = {name: table.table(name) for name in COLLECTIVES if name in table.data}
    for each in measured.values():
        each.refuse_others("bandwidth", "latency")
    return Link(
        bandwidth=table.number("bandwidth"),
        latency=table.number("latency", zero=True),
        duplex=table.flag("duplex", True),
        shared=table.flag("shared", False),
        processor=table.number("processor", zero=True, default=0.0),
        collectives={
            name: Rate(each.number("bandwidth"), each.number("latency", zero=True)) for name, each in measured.items()
        },
    )


def _unlike(table: _Table, top: _Table) -> Unlike:
    """The device and link of some ranks: those of the other ranks, with what the table gives in their place."""
    ranks = table.data.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        table.problem("ranks", f"is {ranks!r}; it must be a list of ranks, as [2, 3]")
        ranks = []
    table.refuse_others("ranks", "device", "link")
    usual = {key: top.data[key] if isinstance(top.data.get(key), dict) else {} for key in ("device", "link")}
    own = {key: table.table(key).data for key in usual}
    if "bandwidth" in own["link"] or "latency" in own["link"]:
        usual["link"] = {key: value for key, value in usual["link"].items() if key not in COLLECTIVES}
    found: list[str] = []
    merged = _Table({key: {**usual[key], **own[key]} for key in usual}, table.path, found)
    device, link = _device(merged.table("device")), _link(merged.table("link"))
    table.problems += [line for line in found if line.removeprefix(table.path) not in table.problems]
    return Unlike(tuple(sorted(ranks)), device, link)


class _Table:
    """One table of the file.  Its problems go to the list that all tables of the file share."""

    def __init__(self, data: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.data, self.path, self.problems = data, path, problems

    def problem(self, key: str, what: str) -> None:
        self.problems.append(f"{self.path}{key} {what}")

    def value(self, key: str, valid: Callable[[Any], bool], expected: str, default: Any) -> Any:
        """The valid value of `key`; `default` where it is not given, or not valid, which is a problem."""
        if key not in self.data or valid(self.data[key]):
            return self.data.get(key, default)
        self.problem(key, f"is {self.data[key]!r}; it must be {expected}")
        return default

    def table(self, key: str) -> _Table:
        data = self.value(key, lambda value: isinstance(value, dict), "a table of numbers", {})
        return _Table(data, f"{self.path}{key}.", self.problems)

    def tables(self, key: str) -> list[_Table]:
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self.problem(key, f"is {value!r}; write [[{key}]] over each table of it")
            return []
        return [_Table(each, f"{self.path}{key}[{k}].", self.problems) for k, each in enumerate(value)]

    def number(self, key: str, zero: bool = False, most: float = math.inf, default: float = math.nan) -> float:
        """A finite number > 0, with `zero` >= 0, and <= `most`.  Without a default it must be given."""
        if key not in self.data and math.isnan(default):
            self.problem(key, "is missing; measure it with `splitc calibrate`")
        value: float = self.value(key, _is_finite, "a finite number", default)
        if value < 0 or (value == 0 and not zero) or value > most:
            least = "at least 0" if zero else "more than 0"
            self.problem(key, f"is {value!r}; it must be {least}{'' if most == math.inf else f' and at most {most:g}'}")
        return float(value)

    def name(self) -> str:
        if "name" not in self.data:
            self.problem("name", "is missing; it must be a text")
        return str(self.value("name", lambda value: isinstance(value, str) and value != "", "a text", ""))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.value(key, lambda value: isinstance(value, bool), "true or false", default))

    def count(self, key: str, default: Any) -> Any:
        return self.value(key, lambda value: type(value) is int and value >= 1, "a whole number of at least 1", default)

    def refuse_others(self, *known: str) -> None:
        for key in self.data:
            if key not in known:
                hint = near_name(key, known).strip() or f"known are {', '.join(known)}"
                self.problem(key, f"is an unknown key; {hint}")


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
