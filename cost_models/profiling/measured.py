"""Measure the seconds of layers on this machine: cost lines with a measured time at any batch.

Nodes are timed (`node_times`) at a quarter, half, one, two and four times the example's batch, and the times of a
layer's nodes are added up.  Between these batches

    seconds(b) = the straight line through the two nearest ones

below the smallest and above the largest the first or the last of these lines goes on: that is extrapolated, and a role
that works on more than four times the example's batch, or on very few examples, is priced less surely.  Noise may let
a larger batch take less time than a smaller one: such neighbours get their mean, so that seconds never fall.

Batches that would take too much memory or time are left out, the largest first.  Of a model that is too large for this
machine nothing can be measured.

    price of a layer on a device = seconds * flop rate here / flop rate of the device

with the rates that float32 matrix products reach: the same machine at another speed, such as a quota or a shared core.
"""

from __future__ import annotations

import math
import os
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from splitc import units
from splitc.cost_models.clusters.this_machine import device_name
from splitc.cost_models.compute.clocks import seeded, threads
from splitc.cost_models.profiling.node_cache import NodeCache, node_keys
from splitc.cost_models.profiling.node_times import FIRST, LEAST, NodeTimer
from splitc.cost_models.profiling.random_run import random_inputs, real_root
from splitc.errors import CostError
from splitc.ir.cluster import Cluster
from splitc.ir.costs import CostLine, LayerCost, Measured
from splitc.ir.disk_cache import cache_folder
from splitc.ir.program import Program

_BATCHES = (0.25, 0.5, 1, 2, 4)  # times the example's


@dataclass(frozen=True)
class MeasuredLine(CostLine):
    """A layer's counted cost with its seconds on this machine.

    batches: increasing.  forward, backward: seconds at each of them, non-decreasing.  flop_rate: FLOP/s of float32
    matrix products at the same time.  device: name of the measured device.
    """

    batches: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    flop_rate: float
    device: str

    def at(self, batch: int) -> LayerCost:
        """The counted cost of `batch` examples, and the measured one."""
        forward, backward = (_interpolated(self.batches, line, batch) for line in (self.forward, self.backward))
        return replace(super().at(batch), measured=Measured(forward, backward, self.flop_rate))


def measure_layers(
    program: Program, counted: Mapping[str, CostLine], cache_dir: Path | None = None, budget: float = 30.0
) -> dict[str, MeasuredLine]:
    """Layer -> its counted cost line with its seconds on this machine.

    cache_dir: default that of `measure_this_machine`; nodes whose times are there are not measured again.
    budget: seconds that measuring may take, about; two batches are measured however long they take.
    Raises CostError for a model that needs too much memory, or that fails on random numbers.
    """
    where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = device_name()
    cache = NodeCache(cache_dir or cache_folder(), device if where.type == "cuda" else f"{device}, 1 thread")
    with threads(1), seeded(where):
        keys = _measured(program, counted, cache, where, budget)
    rate = statistics.median(cache.entries[key].flop_rate for found in keys.values() for key in found.values())
    lines = {}
    for layer in program.layers:
        forward, backward = [], []
        for found in keys.values():
            entries = [cache.entries[found[node]] for node in layer.nodes if node in found]
            forward.append(sum(each.forward * each.flop_rate / rate for each in entries))
            backward.append(sum(each.backward * each.flop_rate / rate for each in entries))
        line = counted[layer.name]
        lines[layer.name] = MeasuredLine(
            line.small, line.large, tuple(keys), _rising(forward), _rising(backward), rate, device
        )
    return lines


def require_this_machine(cluster: Cluster) -> None:
    """Raise CostError for a cluster of other devices than the one that layers are measured on."""
    here = device_name()
    if others := [each for each in (cluster.device, *(u.device for u in cluster.unlike)) if each.name != here]:
        raise CostError(
            f"layers are measured on this machine's {here}, and cluster {cluster.name} has {others[0].name}, on which "
            f'they take other times; use counted costs (costs="counted", --costs counted), or measure on that machine'
        )


def is_measured(program: Program) -> bool:
    """Whether the layers of a program are priced by measured times."""
    return any(isinstance(line, MeasuredLine) for line in program.costs.values())


def _measured(
    program: Program, counted: Mapping[str, CostLine], cache: NodeCache, where: torch.device, budget: float
) -> dict[int, dict[str, str]]:
    """Increasing batch -> keys of its nodes, all of which are in the cache afterwards."""
    batches = sorted({max(2, math.ceil(part * program.batch)) for part in _BATCHES})
    found: dict[int, dict[str, str]] = {}
    timer: NodeTimer | None = None
    spent = step = 0.0  # seconds: of the fewest passes so far, and of a pass for each example
    for batch in batches:
        if len(found) > 1 and spent + (FIRST + LEAST) * step * batch > budget:
            break
        keys = node_keys(program, batch)
        if not cache.has(keys.values()):
            shortage = _shortage(program, counted, batch, where)
            if shortage and found:
                break
            if shortage:
                raise CostError(
                    f"the layers of {program.name} cannot be measured here: {shortage}; use counted costs "
                    f'(costs="counted"), or an example of fewer rows'
                )
            timer = timer or NodeTimer(program, real_root(program, where), where)
            cache.add(_entries(timer.times(random_inputs(program, batch, where), budget / 2 / len(batches)), keys))
        found[batch] = keys
        step = sum(cache.entries[key].forward + cache.entries[key].backward for key in keys.values()) / batch
        spent += (FIRST + LEAST) * step * batch
    return found


def _entries(times: Mapping[str, Measured], keys: Mapping[str, str]) -> dict[str, Measured]:
    """Key -> the mean over the nodes that have it."""
    alike: dict[str, list[Measured]] = defaultdict(list)
    for node, key in keys.items():
        alike[key].append(times[node])
    return {
        key: replace(
            found[0],
            forward=statistics.fmean(each.forward for each in found),
            backward=statistics.fmean(each.backward for each in found),
        )
        for key, found in alike.items()
    }


def _shortage(program: Program, counted: Mapping[str, CostLine], batch: int, where: torch.device) -> str:
    """Why a step of `batch` examples cannot be measured: it needs more than half of the free memory; else ""."""
    held = sum(tensor.nbytes * (1 + tensor.trainable) for tensor in program.tensors.values())
    need = held + sum(line.at(batch).saved_bytes for line in counted.values())
    free = free_memory(where)
    if need <= free / 2:
        return ""
    return (
        f"a step of {batch} examples needs {units.nbytes(need)}, and {units.nbytes(free / 2)} are half of what is free"
    )


def free_memory(where: torch.device) -> float:
    """Free bytes on a GPU, or on this machine within the limit of this process's control group."""
    if where.type == "cuda":
        return float(torch.cuda.mem_get_info(where)[0])
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = float(line.split()[1]) * 1024
    with suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        free = min(free, float((group / "memory.max").read_text()) - float((group / "memory.current").read_text()))
    return max(free, 0.0)


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """Isotonic regression: the nearest non-decreasing values, by pooling adjacent violators."""
    blocks: list[list[float]] = []
    for value in values:
        blocks.append([value])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return tuple(statistics.fmean(block) for block in blocks for _ in block)


def _interpolated(batches: Sequence[int], seconds: Sequence[float], batch: int) -> float:
    """Interpolate between the two nearest batches, or extrapolate; from a single one in proportion to the batch."""
    if len(batches) == 1:
        return seconds[0] * batch / batches[0]
    k = min(max(bisect_right(batches, batch), 1), len(batches) - 1)
    slope = (seconds[k] - seconds[k - 1]) / (batches[k] - batches[k - 1])
    return max(seconds[k - 1] + slope * (batch - batches[k - 1]), 0.0)
