"""Divisions of the world into roles, groups and microbatches; which of them a strategy has is in its own file.

As in the papers, the first role reads the data and the last one has the loss.  On unequal clusters `unequal` tries
other ranks and other shares.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from splitc.ir.device import Device
from splitc.passes.planner.order import AT_ONCE, Order
from splitc.passes.planner.request import Request, largest

FEW = 24
"""A world of which all numbers of ranks are tried for a role."""


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
    """The roles in the order of the data, and the order of a step."""

    roles: tuple[Role, ...]
    order: Order = AT_ONCE
    _messages: dict[tuple[int, int], int] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def global_batch(self) -> int:
        return self.roles[0].bounds[-1]

    @cached_property
    def busy(self) -> int:
        """Ranks that compute."""
        return len({rank for role in self.roles for rank in role.ranks})

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """Role -> the first role that it shares ranks with."""
        return tuple(
            next(k for k, other in enumerate(self.roles) if not set(other.ranks).isdisjoint(role.ranks))
            for role in self.roles
        )

    def pieces(self, role: int) -> int:
        """In how many pieces a role computes a step."""
        return max(self.order.pieces, self.roles[role].turns)

    def live(self, role: int, batch: int) -> int:
        """The most of `batch` examples whose activations a rank of a role keeps at once."""
        return self.order._replace(pieces=self.pieces(role)).live(batch, len(self.roles) - role - 1)

    def messages(self, a: int, b: int) -> int:
        """The most ranks of the other role that a rank of roles `a` and `b` shares examples with."""
        if (a, b) not in self._messages:
            here, there = self.roles[a].bounds, self.roles[b].bounds
            self._messages[a, b] = max(_met(here, there), _met(there, here), 1)
        return self._messages[a, b]

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


def all_ranks(request: Request) -> Division:
    """One role on all ranks."""
    return Division((Role(tuple(range(request.world)), request.bounds(request.world)),))


def _met(mine: tuple[int, ...], others: tuple[int, ...]) -> int:
    """The most intervals of `others` that one of `mine` meets."""
    return max(bisect_left(others, b) - bisect_right(others, a) + 1 for a, b in pairwise(mine))


def counts(world: int) -> list[int]:
    """The numbers of ranks below `world` that are tried for a role: all of a few, of many 2^k and 3 2^k."""
    if world <= FEW:
        return list(range(1, world))
    return sorted({ranks << k for ranks in (1, 3) for k in range(world.bit_length()) if ranks << k < world})


def group_sizes(ranks: int) -> list[int]:
    """The sizes of groups of two or more that divide so many ranks."""
    return [size for size in range(2, ranks + 1) if ranks % size == 0]
