"""A cluster as TOML: what a user writes, what `splitc calibrate` measures.

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
conv_launch = 10e-6           # seconds besides for a convolution
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

What `unlike` leaves out is as for the other ranks.  A table that it gives, flop_rate or efficiency, stands in place of
the whole other one; what collectives reach is not taken over to a link with a bandwidth or latency of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitc.errors import CostError, bullets
from splitc.ir.cluster import COLLECTIVES, DTYPES, EFFICIENCIES, Cluster, Device, Link, Rate, Unlike
from splitc.ir.names import near_name

_REQUIRED = ("matmul", "memory")
_TOP = ("name", "source", "world", "ranks_share_device", "cores", "ranks_per_host")
_TABLES = ("device", "link", "local_link", "unlike")


def to_toml(cluster: Cluster) -> str:
    """Text that `parse_cluster` reads back to an equal cluster."""
    lines = [f"name = {_toml(cluster.name)}", f"source = {_toml(cluster.source)}"]
    lines += [f"{key} = {n}" for key in ("world", "ranks_per_host") if (n := getattr(cluster, key)) is not None]
    lines.append(f"ranks_share_device = {_toml(cluster.ranks_share_device)}")
    if cluster.cores != 1:
        lines.append(f"cores = {cluster.cores}")
    lines += ["", "[device]", *_device_lines(cluster.device), "", "[link]", *_link_lines(cluster.link)]
    if cluster.local_link is not None:
        lines += ["", "[local_link]", *_link_lines(cluster.local_link)]
    for each in cluster.unlike:
        lines += ["", "[[unlike]]", f"ranks = {list(each.ranks)}"]
        lines += [f"device.{line}" for line in _device_lines(each.device)]
        lines += [f"link.{line}" for line in _link_lines(each.link)]
    return "\n".join(lines) + "\n"


def digest(cluster: Cluster) -> str:
    """Twelve hex digits of the numbers that prices depend on: not of names, sources and the memory that ranks have."""

    def priced(device: Device) -> Device:
        return replace(device, name="", memory=1.0)

    unlike = tuple(replace(each, device=priced(each.device)) for each in cluster.unlike)
    bare = replace(cluster, name="", source="", device=priced(cluster.device), unlike=unlike)
    return hashlib.sha256(to_toml(bare).encode()).hexdigest()[:12]


def _device_lines(device: Device) -> list[str]:
    lines = [f"name = {_toml(device.name)}", f"memory_bandwidth = {_toml(device.memory_bandwidth)}  # bytes/s"]
    lines += [f"memory = {_toml(device.memory)}  # bytes", f"launch = {_toml(device.launch)}  # seconds"]
    lines += [f"conv_launch = {_toml(device.conv_launch)}  # seconds", f"overlap = {_toml(device.overlap)}"]
    lines += [f"flop_rate.{d} = {_toml(rate)}  # FLOP/s" for d, rate in device.flop_rate.items()]
    return lines + [f"efficiency.{op} = {_toml(part)}" for op, part in device.efficiency.items()]


def _link_lines(link: Link) -> list[str]:
    lines = [f"bandwidth = {_toml(link.bandwidth)}  # bytes/s", f"latency = {_toml(link.latency)}  # seconds"]
    lines += [f"duplex = {_toml(link.duplex)}", f"shared = {_toml(link.shared)}"]
    lines.append(f"processor = {_toml(link.processor)}  # seconds of computing for each byte")
    for name, rate in link.collectives.items():
        lines.append(f"{name}.bandwidth = {_toml(rate.bandwidth)}  # bytes/s")
        lines.append(f"{name}.latency = {_toml(rate.latency)}  # seconds for each round")
    return lines


def parse_cluster(text: str, where: str) -> Cluster:
    """The cluster that a TOML text describes; `where` names the text in errors.

    Raises CostError with every missing number, unknown key and senseless value.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CostError(f"{where} is no TOML file: {error}") from error
    problems: list[str] = []
    top = _Table(data, "", problems)
    ranks_per_host = top.devices("ranks_per_host")
    local = _link(top.table("local_link")) if "local_link" in data else None
    if ("local_link" in data) != ("ranks_per_host" in data):
        problems.append("local_link and ranks_per_host belong together: give both, or neither")
    if local is not None and local.shared:
        problems.append("local_link.shared is true; give the bandwidth that a rank has while all of its host send")
    cluster = Cluster(
        name=top.text("name"),
        device=_device(top.table("device")),
        link=_link(top.table("link")),
        world=top.devices("world"),
        ranks_share_device=top.flag("ranks_share_device", False),
        source=top.text("source", ""),
        cores=top.devices("cores") or 1,
        local_link=local,
        ranks_per_host=ranks_per_host,
        unlike=tuple(_unlike(table, top) for table in top.tables("unlike")),
    )
    ranks = [rank for each in cluster.unlike for rank in each.ranks]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        problems.append(f"unlike names ranks more than once: {', '.join(map(str, twice))}")
    if cluster.world is not None and any(rank >= cluster.world for rank in ranks):
        problems.append(f"unlike names rank {max(ranks)}; the cluster has ranks 0 to {cluster.world - 1}")
    top.refuse_others(*_TOP, *_TABLES)
    if problems:
        raise CostError(bullets(f"{where} does not describe a cluster:", list(dict.fromkeys(problems))))
    return cluster


def _device(table: _Table) -> Device:
    rates, efficiency = table.table("flop_rate"), table.table("efficiency")
    if not rates.data:
        table.problems.append(
            f"{table.path}flop_rate has no number; give flop_rate.float32 in FLOP/s, or measure it with "
            f"`splitc calibrate`"
        )
    table.refuse_others(
        *("name", "flop_rate", "memory_bandwidth", "memory", "efficiency", "launch", "conv_launch", "overlap")
    )
    rates.refuse_others(*DTYPES)
    efficiency.refuse_others(*EFFICIENCIES)
    return Device(
        name=table.text("name"),
        flop_rate={dtype: rates.number(dtype) for dtype in DTYPES if dtype in rates.data},
        memory_bandwidth=table.number("memory_bandwidth"),
        memory=table.number("memory"),
        efficiency={
            op: efficiency.number(op, most=1.0) for op in EFFICIENCIES if op in _REQUIRED or op in efficiency.data
        },
        launch=table.number("launch", zero=True),
        conv_launch=table.number("conv_launch", zero=True) if "conv_launch" in table.data else 0.0,
        overlap=table.number("overlap", zero=True, most=1.0) if "overlap" in table.data else 1.0,
    )


def _link(table: _Table) -> Link:
    table.refuse_others("bandwidth", "latency", "duplex", "shared", "processor", *COLLECTIVES)
    measured = {name: table.table(name) for name in COLLECTIVES if name in table.data}
    for each in measured.values():
        each.refuse_others("bandwidth", "latency")
    return Link(
        bandwidth=table.number("bandwidth"),
        latency=table.number("latency", zero=True),
        duplex=table.flag("duplex", True),
        shared=table.flag("shared", False),
        processor=table.number("processor", zero=True) if "processor" in table.data else 0.0,
        collectives={
            name: Rate(each.number("bandwidth"), each.number("latency", zero=True)) for name, each in measured.items()
        },
    )


def _unlike(table: _Table, top: _Table) -> Unlike:
    """What some ranks have in place of the others' device and link: only what differs is given."""
    ranks = table.data.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
        table.problems.append(f"{table.path}ranks is {ranks!r}; it must be a list of ranks, as [2, 3]")
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
    """One table of the file; what is wrong with it goes to the list that all tables share."""

    def __init__(self, data: Mapping[str, Any], path: str, problems: list[str]) -> None:
        self.data, self.path, self.problems = data, path, problems

    def table(self, key: str) -> _Table:
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            self.problems.append(f"{self.path}{key} is {value!r}; it must be a table of numbers")
            value = {}
        return _Table(value, f"{self.path}{key}.", self.problems)

    def tables(self, key: str) -> list[_Table]:
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self.problems.append(f"{self.path}{key} is {value!r}; write [[{key}]] over each table of it")
            return []
        return [_Table(each, f"{self.path}{key}[{k}].", self.problems) for k, each in enumerate(value)]

    def number(self, key: str, zero: bool = False, most: float = math.inf) -> float:
        if key not in self.data:
            self.problems.append(f"{self.path}{key} is missing; measure it with `splitc calibrate`")
            return math.nan
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            self.problems.append(f"{self.path}{key} is {value!r}; it must be a finite number")
            return math.nan
        if value < 0 or (value == 0 and not zero) or value > most:
            least = "at least 0" if zero else "more than 0"
            limit = least if most == math.inf else f"{least} and at most {most:g}"
            self.problems.append(f"{self.path}{key} is {value!r}; it must be {limit}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            what = "is missing" if value is None else f"is {value!r}"
            self.problems.append(f"{self.path}{key} {what}; it must be a text")
            return ""
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{self.path}{key} is {value!r}; it must be true or false")
            return default
        return value

    def devices(self, key: str) -> int | None:
        value = self.data.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self.problems.append(f"{self.path}{key} is {value!r}; it must be a whole number of at least 1")
            return None
        return value

    def refuse_others(self, *known: str) -> None:
        for key in self.data:
            if key not in known:
                hint = near_name(key, known).strip() or f"known are {', '.join(known)}"
                self.problems.append(f"{self.path}{key} is an unknown key; {hint}")


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))
