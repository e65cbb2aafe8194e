"""What follows from the roles of a plan: which ranks work together, and on which examples each of them does."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

from splitc.ir.placements import Grouping, LayerPlacement
from splitc.runtime.pieces import Pieces, pieces_of
from splitc.runtime.spec import Rounds

SERVER = "server"
"""The role of ranks that hold parameters of layers with sync "parameter_server": it runs no layers."""

_ALONE = Grouping(1, "BK")


class Ranks:
    """The ranks of a plan, by the fields of `Plan`."""

    world: int
    roles: Mapping[str, tuple[int, ...]]
    placements: Mapping[str, LayerPlacement]
    batch_offsets: Mapping[str, tuple[int, ...]]
    microbatches: int
    groups: Mapping[str, Grouping]
    servers: tuple[int, ...]
    rounds: Rounds | None

    # -- who -----------------------------------------------------------------------------------------------------------

    def roles_of(self, rank: int) -> tuple[str, ...]:
        """The roles that `rank` is in, in the order of the plan; none for a rank without work, or a mere server."""
        return tuple(role for role, positions in self._positions.items() if rank in positions)

    @property
    def all_roles(self) -> dict[str, tuple[int, ...]]:
        """The ranks of every role, that of servers included."""
        return {**self.roles, **({SERVER: self.servers} if self.servers else {})}

    def duties(self, rank: int) -> tuple[str, ...]:
        """The roles of `rank`, that of a server included; none for a rank without work."""
        return self.roles_of(rank) + (SERVER,) * (rank in self.servers)

    @cached_property
    def ranks_by_roles(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The combinations of roles that ranks have -> those ranks.  Ranks of one combination run one program."""
        found: dict[tuple[str, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self.duties(rank), []).append(rank)
        order = list(self.all_roles)
        by_role = sorted(found.keys() - {()}, key=lambda roles: [order.index(role) for role in roles])
        return {roles: tuple(found[roles]) for roles in by_role}

    @cached_property
    def _positions(self) -> dict[str, dict[int, int]]:
        """Role -> rank -> its place in the role."""
        return {role: {rank: k for k, rank in enumerate(ranks)} for role, ranks in self.roles.items()}

    @cached_property
    def deals(self) -> bool:
        """Whether ranks train subnets, whose neurons are dealt to them in each round."""
        return any(place.holding == "subnet" for place in self.placements.values())

    def owners(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks over which the sharded parameters of a role are divided; those of subnets between rounds."""
        return self.roles[role] if self.deals else self.group(role, rank)

    def grouping(self, role: str) -> Grouping:
        """The model-parallel groups of a role; groups of one rank where it has none."""
        return self.groups.get(role, _ALONE)

    def group(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks of the model-parallel group that `rank` is in; itself alone where the role has none."""
        ranks, size = self.roles[role], self.grouping(role).size
        first = self._positions[role][rank] // size * size
        return ranks[first : first + size]

    def replicas(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks of `role` that hold the same parameters as `rank` and train together: one of each group."""
        index, size = self._positions[role][rank], self.grouping(role).size
        return self.together(role, rank)[index % size :: size]

    def together(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks of `role` that train together with `rank`: all where there are no rounds."""
        ranks = self.roles[role]
        return tuple(other for other in ranks if other in self.unit(rank)) if self.rounds else ranks

    def trains_copies(self, role: str) -> bool:
        """Whether several ranks that train together in a role hold the same parameters."""
        return len(self.together(role, self.roles[role][0])) > self.grouping(role).size

    @property
    def trains_in_units(self) -> bool:
        """Whether units of ranks train by themselves for some updates."""
        return self.rounds is not None

    @property
    def joins_losses(self) -> bool:
        """Whether the loss at the end of a round is that of all units, within it that of one."""
        return self.rounds is not None and self.rounds.patience is None

    @property
    def cycle(self) -> str:
        """What is repeated, a step or a round."""
        return "round" if self.rounds else "step"

    @property
    def period(self) -> int:
        """The updates after which units agree again, of a round; 1 where they always do."""
        return self.rounds.steps if self.rounds else 1

    @property
    def unit_size(self) -> int:
        """How many ranks train together between averages; all where there are no rounds."""
        return self.rounds.unit if self.rounds else self.world

    def unit(self, rank: int) -> tuple[int, ...]:
        """The ranks that train together with `rank`."""
        first = rank // self.unit_size * self.unit_size
        return tuple(range(first, min(first + self.unit_size, self.world)))

    def averaged(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks of `role` over which the parameters of `rank` are averaged after a round: one of each unit."""
        return tuple(other for other in self.roles[role] if (other - rank) % self.unit_size == 0)

    # -- examples ------------------------------------------------------------------------------------------------------

    @property
    def reader(self) -> str:
        """The role that reads the data."""
        return next(iter(self.roles))

    @property
    def global_batch(self) -> int:
        return self.batch_offsets[self.reader][-1]

    @property
    def local_batches(self) -> tuple[int, ...]:
        """Examples that each reader gives to a step."""
        return tuple(b - a for a, b in pairwise(self.batch_offsets[self.reader]))

    def interval(self, role: str, rank: int) -> tuple[int, int]:
        """The examples of the global batch that `rank` works on in `role`: first, one past the last."""
        k = self._positions[role][rank]
        return self.batch_offsets[role][k], self.batch_offsets[role][k + 1]

    def batch(self, role: str, rank: int, microbatch: int | None = None) -> int:
        """Examples of `rank` itself in `role`; microbatch: those of one."""
        start, stop = self.pieces(role, rank).positions(self.interval(role, rank), microbatch)
        return stop - start

    def largest_batch(self, role: str) -> int:
        """Examples of the busiest rank of `role`."""
        return max(self.batch(role, rank) for rank in self.roles[role])

    @property
    def in_pieces(self) -> bool:
        """Whether the batch goes through the roles in pieces, one after another."""
        return self.microbatches > 1

    def turns(self, role: str) -> int:
        """How often a role runs in a step, each time on a piece of its examples."""
        return self.microbatches if self.in_pieces else self.grouping(role).turns

    def pieces(self, role: str, rank: int) -> Pieces:
        """The pieces in which `rank` computes in `role`."""
        grouping = self.grouping(role)
        first = self._positions[role][rank] // grouping.size * grouping.size
        key = role, 0 if grouping.scheme == "BK" else first  # by which all groups have the same pieces
        if key not in self._pieces:
            group = self.batch_offsets[role][first : first + grouping.size + 1]
            self._pieces[key] = pieces_of(grouping.scheme, self.microbatches, self.batch_offsets[self.reader], group)
        return self._pieces[key]

    @cached_property
    def _pieces(self) -> dict[tuple[str, int], Pieces]:
        """What `pieces` found, by role and first rank of a group."""
        return {}

    def sizes_at(self, role: str, rank: int, turn: int) -> tuple[int, ...]:
        """For each member of the group of `rank`, how many of its examples a role computes on at once."""
        return tuple(self.batch(role, member, turn) for member in self.group(role, rank))

    def sizes(self, role: str, rank: int) -> list[tuple[int, ...]]:
        """The same of each of the role's turns."""
        return [self.sizes_at(role, rank, k) for k in range(self.turns(role))]

    def own_sizes(self, role: str, rank: int) -> list[int]:
        """Examples of `rank` itself in each piece of the batch."""
        return [self.batch(role, rank, k) for k in (range(self.microbatches) if self.in_pieces else [None])]

    def peak_batch(self, role: str, rank: int) -> int:
        """The most examples that `rank` computes on at once in `role`: those of its group in the largest microbatch."""
        return max(map(sum, self.sizes(role, rank)))

    def sees_whole_batch(self, layer: str) -> bool:
        """Whether every rank that runs `layer` has all examples of a step, or of its unit, at once."""
        role, state = self.placements[layer].role, self.placements[layer].state
        apart = state == "batch" and self.grouping(role).size > 1
        return not self.trains_copies(role) and self.turns(role) == 1 and not apart

    def routes(
        self, rank: int, mine: str, role: str, together: str = "", microbatch: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """(peer, first, one past the last) for every rank of `role` that shares examples with `rank` as one of `mine`.

        The peer may be `rank` itself, where it is in both roles.  together: the one of both roles whose ranks each have
        all examples of their group.  microbatch: of all roles; its examples are counted within it.
        """
        members = self.group(mine, rank) if together == mine else (rank,)
        start, stop = self.interval(mine, members[0])[0], self.interval(mine, members[-1])[1]
        size = self.grouping(role).size if together == role else 1
        bounds, ranks = self.batch_offsets[role][::size], self.roles[role]
        first = max(bisect_right(bounds, start) - 1, 0)
        last = bisect_left(bounds, stop, first)  # of the ranks from here on none shares any
        shared = (
            (peer, max(start, bounds[k]), min(stop, bounds[k + 1]))
            for k in range(first, last)
            for peer in ranks[k * size : (k + 1) * size]
        )
        counted = Pieces(self.microbatches, self.batch_offsets[self.reader]).positions
        positions = ((peer, *counted((a, b), microbatch)) for peer, a, b in shared)
        return tuple((peer, a, b) for peer, a, b in positions if a < b)

    def is_local(self, producer: str, consumer: str) -> bool:
        """Whether every rank of `consumer` has its examples from itself, so that nothing travels between the roles."""
        same = self.batch_offsets[producer] == self.batch_offsets[consumer]
        return same and self.roles[producer] == self.roles[consumer]
