"""Divisions of the world into roles, groups and microbatches, and those that each strategy has.

    single_device       one role on rank 0
    data_parallel, late_multiply      one role on all ranks
    modulo_shard        two roles on all ranks, the second in groups of consecutive ranks
    layer_separation    two or more roles on ranks of their own
    hybrid_single       one role on all ranks, another on rank 0
    mixed               two roles on ranks of their own or on all ranks, groups of any size, any microbatches

As in the papers, the first role reads the data and the last one has the loss.  On unequal clusters `unequal` tries
other ranks and other shares.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product

from splitc.ir.cluster import Device
from splitc.ir.shares import serve
from splitc.ir.strategies import HybridSingle, LayerSeparation, Mixed, ModuloShard, SingleDevice
from splitc.ir.strategy import Strategy
from splitc.passes.planner.request import Request, largest

FEW = 24
"""A world of which all numbers of ranks are tried for a role."""

MICROBATCHES = (2, 3, 4)
"""Numbers of microbatches that are tried where none was asked for."""


@dataclass(frozen=True)
class Role:
    """A role's ranks, the bounds of their examples, and the size of its groups.

    scheme, updates: as of a `Grouping`.
    """

    ranks: tuple[int, ...]
    bounds: tuple[int, ...]
    group: int = 1
    scheme: str = "BK"
    updates: str = "once"

    @cached_property
    def batch(self) -> int:
        """Examples of its busiest rank."""
        return largest(self.bounds)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.ranks[k : k + self.group] for k in range(0, len(self.ranks), self.group))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same shards: one of each group."""
        return tuple(self.ranks[k :: self.group] for k in range(self.group))

    @property
    def turns(self) -> int:
        """In how many pieces a group works on its examples whatever the microbatches."""
        return 1 if self.scheme == "BK" else self.group


@dataclass(frozen=True)
class Division:
    """The roles in the order of the data, and the microbatches of a step."""

    roles: tuple[Role, ...]
    microbatches: int = 1
    schedule: str = "all_forward"

    @property
    def global_batch(self) -> int:
        return self.roles[0].bounds[-1]

    @cached_property
    def busy(self) -> int:
        """Ranks that compute."""
        return len({rank for role in self.roles for rank in role.ranks})

    @property
    def classes(self) -> tuple[int, ...]:
        """Role -> the first role that it shares ranks with."""
        return tuple(
            next(k for k, other in enumerate(self.roles) if not set(other.ranks).isdisjoint(role.ranks))
            for role in self.roles
        )

    def pieces(self, role: int) -> int:
        """In how many pieces a role computes a step."""
        return max(self.microbatches, self.roles[role].turns)

    def live(self, role: int, batch: int) -> int:
        """The most of `batch` examples whose activations a rank of a role keeps at once."""
        m, later = self.pieces(role), len(self.roles) - role - 1
        pieces = min(later + 1, m) if self.schedule == "1f1b" or not later else m
        return min(batch, -(-batch // m) * pieces)

    def messages(self, a: int, b: int) -> int:
        """The most ranks of the other role that a rank of roles `a` and `b` shares examples with."""
        if (a, b) not in self._messages:
            here, there = self.roles[a].bounds, self.roles[b].bounds
            self._messages[a, b] = max(_met(here, there), _met(there, here), 1)
        return self._messages[a, b]

    @cached_property
    def _messages(self) -> dict[tuple[int, int], int]:
        return {}

    def is_local(self, a: int, b: int) -> bool:
        """Whether nothing travels between two roles."""
        return (self.roles[a].ranks, self.roles[a].bounds) == (self.roles[b].ranks, self.roles[b].bounds)


@dataclass(frozen=True)
class Busiest:
    """A kind of device in a role, and the most examples that a rank with it has.

    scale: bytes of a rank of which a byte here is as large a part as of the memory that all are compared with.
    """

    device: Device
    batch: int
    scale: float = 1.0


def busiest(request: Request, role: Role, computing: int) -> tuple[Busiest, ...]:
    """The kinds of devices of a role while `computing` ranks compute; a rank has what the others of its group have."""
    if not request.cluster.unlike:
        return (Busiest(request.device_for(computing), role.batch),)
    shares = [b - a for a, b in pairwise(role.bounds)]
    most: dict[int, tuple[int, int]] = {}
    for k, rank in enumerate(role.ranks):
        first = k // role.group * role.group
        kind, batch = request.cluster.kind_of(rank), max(shares[first : first + role.group])
        most[kind] = max(most.get(kind, (0, rank)), (batch, rank))
    have = request.memory_of(computing)
    devices = ((request.device_of(rank, computing), batch) for batch, rank in most.values())
    return tuple(Busiest(d, batch, 1.0 if request.memory else have / d.memory) for d, batch in devices)


def divisions(request: Request, asked: Strategy) -> Iterator[Division]:
    """Those of a strategy; `Auto` stands for the whole space, of which all others are a part."""
    world, everyone = request.world, tuple(range(request.world))
    if isinstance(asked, SingleDevice):
        yield Division((Role((0,), request.bounds(1)),))
    elif isinstance(asked, LayerSeparation):
        yield from _separations(request, asked)
    elif isinstance(asked, HybridSingle):
        bounds = request.bounds(world)
        yield Division((Role(everyone, bounds), Role((0,), (0, bounds[-1]))))
    elif isinstance(asked, ModuloShard):
        bounds, updates = request.bounds(world), asked.updates or "once"
        for size in _sizes(world):
            scheme = asked.scheme or ("B/K" if size <= FEW else "BK")  # in pieces of some size
            if asked.mp in (None, size):
                yield Division((Role(everyone, bounds), Role(everyone, bounds, size, scheme, updates)))
    elif not isinstance(asked, Mixed):
        yield Division((Role(everyone, request.bounds(world)),))
    else:
        yield from _whole_space(request)


def _whole_space(request: Request) -> Iterator[Division]:
    world, everyone = request.world, tuple(range(request.world))
    bounds = request.bounds(world)
    yield Division((Role(everyone, bounds),))
    pairs = [Division((Role(everyone, bounds), Role(everyone, bounds, size))) for size in _sizes(world)]
    pairs += _separations(request, LayerSeparation(), grouped=True)
    for pair in pairs:
        yield pair
        for m in MICROBATCHES[-1 if world > FEW else 0 :] if not request.program.in_batch else ():
            if m <= min(b - a for role in pair.roles[:1] for a, b in zip(role.bounds, role.bounds[1:], strict=False)):
                yield replace(pair, microbatches=m)


def _separations(request: Request, asked: LayerSeparation, grouped: bool = False) -> Iterator[Division]:
    """Roles on ranks of their own.  grouped: the last one also in groups."""
    pinned = any(pin.only_in_groups for pin in request.pins.values())
    for sizes in _role_sizes(request.world, asked):
        starts = [0, *accumulate(sizes)]
        bounds = [request.bounds(sizes[0])]
        for size in sizes[1:]:
            bounds.append(serve(bounds[-1], size))
        ranks = [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
        roles = tuple(Role(*each) for each in zip(ranks, bounds, strict=True))
        yield Division(roles)
        groups = _sizes(sizes[-1]) if grouped else []
        for size in groups if request.world <= FEW else groups[-1:]:
            yield Division((*roles[:-1], replace(roles[-1], group=size)))
        if pinned and not grouped:
            choices = [[1, *(k for k in pinned_sizes(request, size) if k > 1 and size % k == 0)] for size in sizes[1:]]
            for several in product(*choices):
                if max(several) > 1:
                    with_groups = (replace(role, group=k) for role, k in zip(roles[1:], several, strict=True))
                    yield Division((roles[0], *with_groups))


def pinned_sizes(request: Request, ranks: int) -> list[int]:
    """The sizes of groups that pins ask for: all `ranks` of a role where none says one."""
    return sorted({pin.group for pin in request.pins.values() if pin.group is not None and pin.group > 1}) or [ranks]


def _role_sizes(world: int, asked: LayerSeparation) -> list[tuple[int, ...]]:
    if asked.sizes:
        return [asked.sizes]
    if asked.n_c is not None:
        return [(asked.n_c, world - asked.n_c)]
    return [(world - n_f, n_f) for n_f in ([asked.n_f] if asked.n_f is not None else counts(world))]


def _met(mine: tuple[int, ...], others: tuple[int, ...]) -> int:
    """The most intervals of `others` that one of `mine` meets."""
    return max(bisect_left(others, b) - bisect_right(others, a) + 1 for a, b in pairwise(mine))


def counts(world: int) -> list[int]:
    """The numbers of ranks below `world` that are tried for a role: all of a few, of many 2^k and 3 2^k."""
    if world <= FEW:
        return list(range(1, world))
    return sorted({ranks << k for ranks in (1, 3) for k in range(world.bit_length()) if ranks << k < world})


def _sizes(ranks: int) -> list[int]:
    """The sizes of groups of two or more that divide so many ranks."""
    return [size for size in range(2, ranks + 1) if ranks % size == 0]
