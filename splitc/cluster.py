"""A cluster: the devices and the links that a plan is priced on, and its TOML form.

All ranks have the same device and the same link.  Numbers are SI base units: FLOP/s, bytes/s,
bytes, seconds.

    name = "v100-10gbe"
    source = "where the numbers are from"
    world = 11                    # devices there are; leave it out when there is no limit

    [device]
    name = "Tesla V100 16 GB"
    memory_bandwidth = 900e9      # bytes/s
    memory = 16e9                 # bytes
    launch = 5e-6                 # seconds for one op
    flop_rate.float32 = 15.7e12   # peak FLOP/s; one line for each dtype
    efficiency.matmul = 0.5       # part of the peak that is reached
    efficiency.memory = 0.75

    [link]
    bandwidth = 1.25e9            # bytes/s of one direction
    latency = 30e-6               # seconds for one message
    duplex = true                 # both directions at once at full bandwidth
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from splitc.errors import CostError, bullets

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
OP_CLASSES = ("matmul", "memory")


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    flop_rate: dtype name -> peak FLOP/s.  memory_bandwidth: bytes/s.  memory: bytes.
    efficiency: op class ("matmul", "memory") -> part of the peak that is reached, 0 to 1.
    launch: seconds that starting one op takes.
    """

    name: str
    flop_rate: Mapping[str, float]
    memory_bandwidth: float
    memory: float
    efficiency: Mapping[str, float]
    launch: float


@dataclass(frozen=True)
class Link:
    """What joins a rank to all others.

    bandwidth: bytes/s of one direction.  latency: seconds for one message.
    duplex: it sends and receives at full bandwidth at the same time.
    """

    bandwidth: float
    latency: float
    duplex: bool = True


@dataclass(frozen=True)
class Cluster:
    """Equal devices joined by equal links.

    world: how many devices there are; None when there is no limit. ranks_share_device: all ranks
    compute on the same cores, so n ranks get 1/n of its rates and memory each. source: where the
    numbers are from.
    """

    name: str
    device: Device
    link: Link
    world: int | None = None
    ranks_share_device: bool = False
    source: str = ""

    def device_for(self, ranks: int) -> Device:
        """What one of `ranks` computing ranks has of the device."""
        if not self.ranks_share_device or ranks == 1:
            return self.device
        return replace(
            self.device,
            flop_rate={dtype: rate / ranks for dtype, rate in self.device.flop_rate.items()},
            memory_bandwidth=self.device.memory_bandwidth / ranks,
            memory=self.device.memory / ranks,
        )

    def to_toml(self) -> str:
        """Text that `parse_cluster` reads back to an equal cluster."""
        device, link = self.device, self.link
        lines = [f"name = {_toml(self.name)}", f"source = {_toml(self.source)}"]
        if self.world is not None:
            lines.append(f"world = {self.world}")
        lines.append(f"ranks_share_device = {_toml(self.ranks_share_device)}")
        lines += ["", "[device]", f"name = {_toml(device.name)}"]
        lines += [f"memory_bandwidth = {_toml(device.memory_bandwidth)}  # bytes/s"]
        lines += [
            f"memory = {_toml(device.memory)}  # bytes",
            f"launch = {_toml(device.launch)}  # seconds",
        ]
        lines += [f"flop_rate.{d} = {_toml(rate)}  # FLOP/s" for d, rate in device.flop_rate.items()]
        lines += [f"efficiency.{op} = {_toml(part)}" for op, part in device.efficiency.items()]
        lines += ["", "[link]", f"bandwidth = {_toml(link.bandwidth)}  # bytes/s"]
        lines += [f"latency = {_toml(link.latency)}  # seconds", f"duplex = {_toml(link.duplex)}"]
        return "\n".join(lines) + "\n"


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
    device, link = top.table("device"), top.table("link")
    rates, efficiency = device.table("flop_rate"), device.table("efficiency")
    cluster = Cluster(
        name=top.text("name"),
        device=Device(
            name=device.text("name"),
            flop_rate={dtype: rates.number(dtype) for dtype in DTYPES if dtype in rates.data},
            memory_bandwidth=device.number("memory_bandwidth"),
            memory=device.number("memory"),
            efficiency={op: efficiency.number(op, most=1.0) for op in OP_CLASSES},
            launch=device.number("launch", zero=True),
        ),
        link=Link(
            bandwidth=link.number("bandwidth"),
            latency=link.number("latency", zero=True),
            duplex=link.flag("duplex", True),
        ),
        world=top.devices("world"),
        ranks_share_device=top.flag("ranks_share_device", False),
        source=top.text("source", ""),
    )
    if not rates.data:
        problems.append(
            "device.flop_rate has no number; give flop_rate.float32 in FLOP/s, or measure it with `splitc calibrate`"
        )
    top.refuse_others("name", "source", "world", "ranks_share_device", "device", "link")
    device.refuse_others("name", "flop_rate", "memory_bandwidth", "memory", "efficiency", "launch")
    link.refuse_others("bandwidth", "latency", "duplex")
    rates.refuse_others(*DTYPES)
    efficiency.refuse_others(*OP_CLASSES)
    if problems:
        raise CostError(bullets(f"{where} does not describe a cluster:", problems))
    return cluster


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

    def number(self, key: str, zero: bool = False, most: float = math.inf) -> float:
        if key not in self.data:
            self.problems.append(f"{self.path}{key} is missing; measure it with `splitc calibrate`")
            return math.nan
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
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
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                self.problems.append(f"{self.path}{key} is an unknown key; {hint}")


def _toml(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value))
