"""The request for a plan: the program, the cluster and the limits, with the prices that all strategies read.

Times are of one step: forward, backward and the gradient sync, which does not overlap with backward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from splitc.cost_models.compute.dtypes import layer_dtypes
from splitc.cost_models.compute.roofline import layer_seconds
from splitc.cost_models.memory.memory import gradient_nbytes, needed_nbytes
from splitc.cost_models.network.alpha_beta import all_gather, recursive_doubling, ring_all_reduce
from splitc.cost_models.network.sum_shares import shared_sum, sum_shares
from splitc.ir.cluster import Cluster
from splitc.ir.device import Device, Link
from splitc.ir.graph import tensor_spec
from splitc.ir.layers import StateTensor
from splitc.ir.linears import Linear, Table, column_layers, divisible_layers, late_layers, linear_layers, sparse_tables
from splitc.ir.program import Program
from splitc.ir.roles import has_convolutions, role_names
from splitc.ir.shares import share_out
from splitc.passes.planner.dividing import Divisible, divisible_kinds
from splitc.passes.planner.order import AT_ONCE, Order
from splitc.passes.planner.pins import Pin
from splitc.passes.planner.problem import Option
from splitc.runtime.transport.collective import are_unequal
from splitc.runtime.transport.formats import AS_COMPUTED, BLOCK, Wire, format_of


class Carried(NamedTuple):
    """What a byte of a value takes to travel: bytes on the wire, and seconds to encode and to decode it."""

    ratio: float = 1.0
    cast: float = 0.0


AS_IT_IS = Carried()


@dataclass(frozen=True)
class Request:
    """The program to place, and everything that limits its plans.

    global_batch: examples of a step; None: `program.batch` for each rank that reads.  memory: bytes of a rank; None:
    the device's.  optimizer_copies: copies of the parameters in the optimizer's state.  time_limit: of the search (s).
    all_reduce: its algorithm, "backend" or "recursive_doubling".  order: that is asked for.
    accumulate: batches to an update.  wire: the formats in which numbers travel.
    options: what all a role depends on -> layer -> the ways to run it there.  simulated: a plan's hash and
    how many samples -> its step, and what nine of ten take at most (s).
    """

    program: Program
    cluster: Cluster
    world: int
    pins: Mapping[str, Pin] = field(default_factory=dict)
    global_batch: int | None = None
    memory: float | None = None
    optimizer_copies: int = 1
    time_limit: float = 60.0
    all_reduce: str = "backend"
    order: Order = AT_ONCE
    accumulate: int = 1
    wire: Wire = AS_COMPUTED
    options: dict[object, dict[str, tuple[Option, ...]]] = field(default_factory=dict, init=False, compare=False)
    simulated: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict, init=False, compare=False)
    _times: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict, init=False, compare=False)
    _devices: dict[tuple[int, int], Device] = field(default_factory=dict, init=False, compare=False)

    def all_reduce_seconds(self, nbytes: float, *groups: Sequence[int]) -> float:
        """Summing `nbytes` over the ranks of a group, while other groups of as many ranks do the same.

        By a ring or in shares, or by recursive doubling where that was asked for.
        """
        algorithm, form = recursive_doubling if self._doubling else ring_all_reduce, self.form("gradients")
        seconds = algorithm(form.ratio * nbytes, len(groups[0]), self.all_reduce_link(*groups))
        if all(are_unequal(group, self.sum_shares) for group in groups):
            times = (shared_sum(form.ratio * nbytes, self.cluster, group, self.sum_shares) for group in groups)
            seconds = min(seconds, max(times))
        return seconds + form.cast * nbytes

    @cached_property
    def sum_shares(self) -> tuple[int, ...]:
        """What the ranks may add up of sums, where that can be faster than a ring."""
        return () if self._doubling else sum_shares(self.cluster, self.world)

    def all_reduce_link(self, *groups: Sequence[int]) -> Link:
        """The link that an all-reduce of each of `groups` runs on, all at once."""
        return self.link_over(not self._doubling, groups)

    def all_gather_seconds(self, nbytes: float, *groups: Sequence[int]) -> float:
        """All-gathering `nbytes` of inputs and errors in all over a group, while other groups do the same."""
        form = self.form("factors")
        return all_gather(form.ratio * nbytes, len(groups[0]), self.link_over(True, groups)) + form.cast * nbytes

    def form(self, kind: str, dtype: torch.dtype = torch.float32) -> Carried:
        """How a kind of payload travels that is computed in a dtype."""
        found, device = format_of(getattr(self.wire, kind), dtype, BLOCK * BLOCK), self.cluster.device
        if found is None:
            return AS_IT_IS
        rate = device.memory_bandwidth * device.efficiency_of("memory")
        cast = 2 * found.traffic / dtype.itemsize / rate
        return Carried((found.size + found.scale / BLOCK) / dtype.itemsize, cast)

    @property
    def _doubling(self) -> bool:
        return self.all_reduce == "recursive_doubling"

    @cached_property
    def link_over(self) -> Callable[[bool, tuple[Sequence[int], ...]], Link]:
        """The link that collectives of groups run on at once, in rings or not: the cluster's, looked up once."""
        return cache(lambda rings, groups: self.cluster.link_over(*groups, rings=rings))

    def role_names(self, count: int) -> tuple[str, ...]:
        """The names of `count` roles, in the order in which data passes through them."""
        return role_names(count, self._has_convolutions)

    @cached_property
    def _has_convolutions(self) -> bool:
        return has_convolutions(self.program)

    def bounds(self, readers: int) -> tuple[int, ...]:
        """How `readers` ranks share the global batch; some shares are empty when it is too small."""
        return share_out(self.program.batch * readers if self.global_batch is None else self.global_batch, readers)

    def memory_of(self, ranks: int) -> float:
        """Bytes that one of `ranks` computing ranks has."""
        return self.device_for(ranks).memory if self.memory is None else self.memory

    def seconds(self, layer: str, batch: int, ranks: int) -> float:
        """Compute seconds of a step of `batch` examples on the slowest of `ranks` computing ranks."""
        return sum(self.times(layer, batch, ranks))

    def times(self, layer: str, batch: int, ranks: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of `seconds`."""
        return self.times_on(self.device_for(ranks), layer, batch)

    def seconds_on(self, device: Device, batch: int) -> float:
        """Compute seconds of a step of all layers on a device."""
        return sum(sum(self.times_on(device, layer, batch)) for layer in self.program.costs)

    def times_on(self, device: Device, layer: str, batch: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of `batch` examples on a device of the cluster."""
        key = self.alike[layer], batch, id(device)
        if key not in self._times:
            self._times[key] = layer_seconds(self.program.costs[layer].at(batch), device, self.dtypes[layer])
        return self._times[key]

    @cached_property
    def deadline(self) -> float:
        """By the clock `time.monotonic`; from the first time that it is asked for."""
        return time.monotonic() + self.time_limit

    @cached_property
    def device_for(self) -> Callable[[int], Device]:
        """`Cluster.device_for`, looked up once."""
        return cache(self.cluster.device_for)

    def device_of(self, rank: int, computing: int) -> Device:
        """`Cluster.device_of`, the same object for all ranks of a kind."""
        key = self.cluster.kind_of(rank), computing
        return self._devices.setdefault(key, self.cluster.device_of(rank, computing))

    def live(self, batch: int, later: int = 0) -> int:
        """The most of `batch` examples whose activations a rank keeps at once, with `later` roles after its own."""
        return self.order.live(batch, later)

    def layer_memory(self, layer: str, batch: int, summed: bool) -> float:
        """Bytes that a layer needs on a rank; `summed`: its gradient is all-reduced, from a copy."""
        kept, gradient = self.program.costs[layer].saved_bytes_at(batch), self.gradient(layer)
        whole = self._standing[layer] + kept + (gradient if summed else 0)
        return whole - (gradient if layer in self.sparse else 0)  # which has a few rows

    @cached_property
    def _standing(self) -> dict[str, float]:
        """Layer -> bytes that it needs for any batch: its tensors, gradients and optimizer state."""
        return {name: needed_nbytes(held, 0, 0, self.optimizer_copies) for name, held in self.held.items()}

    @cached_property
    def gradient(self) -> Callable[[str], int]:
        """Layer -> bytes of the gradient of its own parameters."""
        return cache(lambda layer: gradient_nbytes(self.held[layer]))

    def gradient_of(self, layer: str) -> int:
        """Bytes of the gradient of all parameters that the layer uses, tied ones too."""
        return gradient_nbytes(self.program.tensors[name] for name in self.program.layer(layer).tensors)

    def rows_nbytes(self, layer: str, examples: int) -> int:
        """Bytes of the rows that so many examples look up in the tables of a layer."""
        uses = ((tensor_spec(use.values[0]).at(examples), tensor_spec(use.output)) for use in self.late[layer])
        return sum(math.prod(shape) * spec.shape[-1] * spec.dtype.itemsize for shape, spec in uses)

    @cached_property
    def sparse(self) -> frozenset[str]:
        """The layers that use a table with a sparse gradient."""
        tables = sparse_tables(self.program)
        return frozenset(layer.name for layer in self.program.layers if not tables.isdisjoint(layer.tensors))

    def shares(self, layer: str) -> bool:
        """Whether other layers use a parameter of a layer too."""
        return any(self.program.users[name] > 1 for name in self.program.layer(layer).tensors)

    @cached_property
    def held(self) -> dict[str, tuple[StateTensor, ...]]:
        """Layer -> its parameters and buffers; what several layers use belongs to the first."""
        seen: set[str] = set()
        held = {}
        for layer in self.program.layers:
            own = [name for name in dict.fromkeys(layer.tensors) if name not in seen]
            seen.update(own)
            held[layer.name] = tuple(self.program.tensors[name] for name in own)
        return held

    @cached_property
    def linears(self) -> dict[str, tuple[Linear, ...]]:
        """The linear layers that own their weights, and those that multiply by what is computed of it -> their uses."""
        return linear_layers(self.program) | column_layers(self.program)

    @cached_property
    def late(self) -> dict[str, tuple[Linear | Table, ...]]:
        """The layers that can be late-multiplied -> their uses."""
        return late_layers(self.program)

    @cached_property
    def divisible(self) -> frozenset[str]:
        """The layers that a pin can divide."""
        return divisible_layers(self.program)

    @cached_property
    def dividing(self) -> dict[str, Divisible]:
        """The layers that can be divided -> how."""
        return divisible_kinds(self.program, self.divisible)

    @cached_property
    def alike(self) -> dict[str, str]:
        """Layer -> the first layer with the same numbers, of which a deep model repeats many."""
        first: dict[object, str] = {}
        return {layer.name: first.setdefault(self._numbers(layer.name), layer.name) for layer in self.program.layers}

    def _numbers(self, layer: str) -> object:
        """All that the price and the memory of a layer come from."""
        held = tuple(replace(tensor, name="", names=()) for tensor in self.held[layer])
        used = tuple(tuple(map(tensor_spec, (*u.values, u.output))) for u in self.late.get(layer, ()))
        kind = self.dividing.get(layer)
        divided = kind and (kind.outputs, tuple(kind.splits.items()), kind.features, kind.sums, kind.is_loss)
        of_batch = layer == self.program.in_batch
        of_others = self.gradient_of(layer), self.shares(layer), layer in self.sparse
        return self.program.costs[layer], self.dtypes[layer], held, of_others, used, divided, of_batch

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Layer -> the dtype it computes in."""
        return layer_dtypes(self.program, self.cluster.device)


def smallest(bounds: tuple[int, ...]) -> int:
    """The smallest share of `bounds`."""
    return min(b - a for a, b in pairwise(bounds))


def largest(bounds: tuple[int, ...]) -> int:
    """The largest share of `bounds`."""
    return max(b - a for a, b in pairwise(bounds))
