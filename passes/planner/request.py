"""What is asked of the planner, and the offers of the families that need no search.

An Offer is the best plan of one strategy, priced; an infeasible one says why.  Times are of one
step, forward, backward and the sum of the gradients, which is not overlapped with backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from splitc import units
from splitc.cost_models.compute.dtypes import layer_dtypes
from splitc.cost_models.compute.roofline import layer_seconds
from splitc.cost_models.memory.memory import gradient_nbytes, rank_memory
from splitc.cost_models.network.alpha_beta import all_gather, recursive_doubling, ring_all_reduce
from splitc.ir.cluster import Cluster, Device, Link
from splitc.ir.layers import StateTensor
from splitc.ir.linears import Linear, linear_layers
from splitc.ir.plan import Grouping, LayerPlacement, share_out
from splitc.ir.program import Program
from splitc.passes.planner.pins import Pin, contradictions
from splitc.passes.planner.separation import Separation


@dataclass(frozen=True)
class Request:
    """The program to place and everything that bounds its plans.

    global_batch: examples of a step; None: `program.batch` for each rank that reads.  memory: bytes
    of a rank; None: the device's.  optimizer_copies: of the parameters.  time_limit: seconds.
    all_reduce: the algorithm, as of a plan.
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

    def all_reduce_seconds(self, nbytes: float, *groups: Sequence[int]) -> float:
        """Summing `nbytes` over the ranks of a group, while other groups of as many ranks do the same.

        By a ring, or by recursive doubling where that was asked for.
        """
        seconds = recursive_doubling if self._doubling else ring_all_reduce
        return seconds(nbytes, len(groups[0]), self.all_reduce_link(*groups))

    def all_reduce_link(self, *groups: Sequence[int]) -> Link:
        """What an all-reduce of each of `groups` runs on, all at once."""
        return self._link_over(not self._doubling, groups)

    def all_gather_seconds(self, nbytes: float, *groups: Sequence[int]) -> float:
        """Giving `nbytes` to the ranks of a group, which have a part each, while other groups do the same."""
        return all_gather(nbytes, len(groups[0]), self._link_over(True, groups))

    @property
    def _doubling(self) -> bool:
        return self.all_reduce == "recursive_doubling"

    def _link_over(self, rings: bool, groups: tuple[Sequence[int], ...]) -> Link:
        """The cluster's, looked up once."""
        if (rings, groups) not in self._links:
            self._links[rings, groups] = self.cluster.link_over(*groups, rings=rings)
        return self._links[rings, groups]

    @cached_property
    def _links(self) -> dict[tuple[bool, tuple[Sequence[int], ...]], Link]:
        return {}

    def groups(self, size: int) -> tuple[range, ...]:
        """The world in groups of `size` ranks."""
        return tuple(range(first, first + size) for first in range(0, self.world, size))

    def replicas(self, size: int) -> tuple[range, ...]:
        """The ranks that hold the same in a world in groups of `size`: one rank of each group."""
        return tuple(range(first, self.world, size) for first in range(size))

    def bounds(self, readers: int) -> tuple[int, ...]:
        """How `readers` ranks share the global batch; some shares are empty when it is too small."""
        batch = self.program.batch * readers if self.global_batch is None else self.global_batch
        return share_out(batch, readers)

    def memory_of(self, ranks: int) -> float:
        """Bytes that one of `ranks` computing ranks has."""
        return self.cluster.device_for(ranks).memory if self.memory is None else self.memory

    def seconds(self, layer: str, batch: int, device: Device) -> float:
        """Compute seconds of a step of `batch` examples."""
        return layer_seconds(self.program.costs[layer].at(batch), device, self.dtypes[layer])

    def layer_memory(self, layer: str, batch: int, summed: bool) -> float:
        """Bytes that a layer needs on a rank; `summed`: its gradient is all-reduced, in a copy."""
        held = self.held[layer]
        kept = self.program.costs[layer].at(batch).saved_bytes
        copies = gradient_nbytes(held) if summed else 0
        return rank_memory(held, kept, copies, self.optimizer_copies).total

    def served_memory(self, layer: str, batch: int) -> float:
        """Bytes that a layer needs on a worker whose parameters servers hold: they have the optimizer and the sum."""
        held = self.held[layer]
        pushed = gradient_nbytes(held)
        return sum(h.nbytes for h in held) + self.program.costs[layer].at(batch).saved_bytes + pushed

    def gradient(self, layer: str) -> int:
        """Bytes of the gradient of the layer's own parameters."""
        return gradient_nbytes(self.held[layer])

    def gradient_of(self, layer: str) -> int:
        """Bytes of the gradient of all parameters that the layer uses, tied ones too."""
        return gradient_nbytes(self.program.tensors[name] for name in self.program.layer(layer).tensors)

    def layer_copy(self, name: str) -> float:
        """Bytes of a tensor that another layer counts, where a layer needs one of its own: a tied parameter's copy."""
        return rank_memory([self.program.tensors[name]], 0.0, 0.0, self.optimizer_copies).total

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
        """The layers that can be divided or late-multiplied -> their uses."""
        return linear_layers(self.program)

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Layer -> the dtype it computes in."""
        return layer_dtypes(self.program, self.cluster.device)


@dataclass(frozen=True)
class Offer:
    """The best plan of one strategy.

    role_of: layer -> role.  most: samples per second that no plan of the strategy exceeds.
    searched: whether a solver has looked for it (or there was nothing to search).  problem: the
    numbers of a separation.  placements: of the layers, where they are not all replicated and
    all-reduced; groups, servers, overlap, all_reduce: as of a plan.
    """

    strategy: str
    feasible: bool
    why: str = ""
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    examples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    role_of: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = 0.0
    most: float = 0.0
    searched: bool = True
    problem: Separation | None = None
    placements: Mapping[str, LayerPlacement] = field(default_factory=dict)
    groups: Mapping[str, Grouping] = field(default_factory=dict)
    servers: tuple[int, ...] = ()
    overlap: bool = True
    exact: bool = True

    @property
    def global_batch(self) -> int:
        return next(iter(self.examples.values()))[-1] if self.examples else 0

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.step_seconds if self.step_seconds else 0.0


def single_device(request: Request) -> Offer:
    """Everything on rank 0; the other ranks are in no role."""
    return _alike("single_device", request, 1)


def data_parallel(request: Request) -> Offer:
    """Everything on every rank, the gradients summed by a ring all-reduce."""
    return _alike("data_parallel", request, request.world)


def _alike(strategy: str, request: Request, ranks: int) -> Offer:
    """The one plan in which `ranks` ranks run all layers."""
    layers = [layer.name for layer in request.program.layers]
    examples = request.bounds(ranks)
    batch = largest(examples)
    gradient = sum(request.gradient(layer) for layer in layers)
    device = request.cluster.device_for(ranks)
    seconds = sum(request.seconds(layer, batch, device) for layer in layers)
    if gradient:
        seconds += request.all_reduce_seconds(gradient, range(ranks))
    needed = {layer: request.layer_memory(layer, batch, ranks > 1) for layer in layers}
    why = contradictions(request.pins, strategy)
    if ranks > 1:
        why += unsummed(request, layers)
    if examples[-1] < ranks:
        why.append(f"{examples[-1]} examples cannot be shared out to {ranks} ranks")
    roles = {"all": tuple(range(ranks))}
    have = request.memory_of(ranks)
    why += shortage(("all",), roles["all"], sum(needed.values()), have, needed)
    return Offer(
        strategy,
        feasible=not why,
        why="; ".join(why),
        roles=roles,
        examples={"all": examples},
        role_of=dict.fromkeys(layers, "all"),
        step_seconds=seconds,
        most=0.0 if why or not seconds else examples[-1] / seconds,
    )


def unsummed(request: Request, layers: Iterable[str]) -> list[str]:
    """The pins that would let several ranks train apart: sync "none" of a layer that trains."""
    return [
        f"pin {pin.pattern!r} asks for sync 'none' of {layer}, whose gradient must be summed when several ranks hold it"
        for layer, pin in request.pins.items()
        if layer in layers and pin.placement.sync == "none" and request.gradient_of(layer)
    ]


def shortage(
    roles: Sequence[str], ranks: tuple[int, ...], need: float, have: float, layers: Mapping[str, float]
) -> list[str]:
    """Return a line if each of `ranks`, which are in all of `roles`, needs more bytes of memory than it has.

    layers: bytes that each layer needs there.
    """
    if need <= have * (1 + 1e-9):
        return []
    largest_layer = max(layers, key=lambda layer: layers[layer])
    return [
        f"{ranks_text(roles, ranks)} needs {units.nbytes(need)} of memory and has "
        f"{units.nbytes(have)}; its largest layer, {largest_layer}, needs "
        f"{units.nbytes(layers[largest_layer])}"
    ]


def ranks_text(roles: Sequence[str], ranks: tuple[int, ...]) -> str:
    """`role fc (rank 3)`, `each rank of role conv (ranks 0 to 2)`, `each rank of roles conv and fc (ranks 0 to 3)`."""
    named = f"role {roles[0]}" if len(roles) == 1 else f"roles {', '.join(roles[:-1])} and {roles[-1]}"
    if len(ranks) == 1:
        return f"{named} (rank {ranks[0]})"
    return f"each rank of {named} (ranks {ranks[0]} to {ranks[-1]})"


def smallest(bounds: tuple[int, ...]) -> int:
    """The smallest share of `bounds`."""
    return min(b - a for a, b in pairwise(bounds))


def largest(bounds: tuple[int, ...]) -> int:
    """The largest share of `bounds`."""
    return max(b - a for a, b in pairwise(bounds))
