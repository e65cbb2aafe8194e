"""The Plan: which ranks run which layers, how parameters are held and how gradients are summed.

A plan is plain data, independent of torch: it is printed, compared, written to `plan.json` and read back.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any

from splitc.errors import LaunchError
from splitc.ir.decode import Limit, Problem, at_least, hints_of, one_of
from splitc.ir.placements import ALL_REDUCES, SCHEDULES, Grouping, LayerPlacement
from splitc.ir.plan_defaults import KEYS, read_decision
from splitc.ir.prediction import Candidate, Prediction
from splitc.runtime.pieces import Pieces, pieces_of
from splitc.runtime.spec import Rounds
from splitc.runtime.transport.formats import AS_COMPUTED, Wire

SERVER = "server"
"""The role of ranks that hold parameters of layers with sync "parameter_server": it runs no layers."""

_ALONE = Grouping(1, "BK")
MOST_RANKS = 100_000
_WHERE_UNUSUAL = ("rounds", "insert_norm", "schedule", "accumulate", "bucket_bytes", "wire", "sum_shares")
_ROLES = Limit(bool, 'of the ranks of each role, as {"trunk": [0, 1], "head": [2]}')


@dataclass(frozen=True)
class Plan:
    """Everything that decides the generated programs, and beside it what they are expected to cost.

    roles: role -> its ranks, in the order of the data's way through them; the first role reads the data.  A rank may
    be in several roles.
    batch_offsets: role -> bounds (0, ..., global_batch); its k-th rank works on examples bounds[k] to bounds[k + 1].
    microbatches: parts of every reader's examples that go through the roles one after another; gradients add up.
    schedule: their order, "all_forward" before the first backward, or "1f1b", forward and backward in turn.
    accumulate: batches to an update, at whose end gradients are summed over ranks.
    groups: role -> its model-parallel groups, where it has some: consecutive ranks, which share their examples.
    servers: ranks that hold the parameters of layers with sync "parameter_server"; overlap: those travel layer by
    layer, while ranks compute.  all_reduce: its algorithm, "backend" or "recursive_doubling".
    synchronised: BatchNorm normalises over the whole global batch.  exact: training equals that in one process.
    rounds: units of ranks train by themselves and average their parameters after each round; None: no rounds.
    bucket_bytes: of the gradients that travel together, on a link that wants more of them than usual; None: as usual.
    insert_norm: the model is normalised where subnets need it, before it is captured.
    wire: the formats in which numbers travel; the plan is approximate where one is not "exact".
    sum_shares: rank -> its part of what is summed, in proportion to those of the others; none where they are equal.
    model: fingerprint of the model.  prediction: takes no part in equality and hash.
    part_of: of roles that were divided at their transitions since, each further one -> the role as decided.
    """

    strategy: str
    world: Annotated[int, at_least(1, MOST_RANKS)]
    roles: Annotated[Mapping[str, tuple[int, ...]], _ROLES]
    placements: Mapping[str, LayerPlacement]
    batch_offsets: Mapping[str, tuple[int, ...]]
    microbatches: Annotated[int, at_least(1)] = 1
    schedule: Annotated[str, one_of(*SCHEDULES)] = "all_forward"
    groups: Mapping[str, Grouping] = field(default_factory=dict)
    servers: tuple[int, ...] = ()
    overlap: bool = True
    all_reduce: Annotated[str, one_of(*ALL_REDUCES)] = "backend"
    synchronised: bool = False
    exact: bool = True
    model: str = ""
    rounds: Rounds | None = None
    insert_norm: bool = False
    accumulate: Annotated[int, at_least(1)] = 1
    bucket_bytes: Annotated[int, at_least(1)] | None = None
    wire: Wire = AS_COMPUTED
    sum_shares: tuple[Annotated[int, at_least(0)], ...] = ()
    prediction: Prediction = field(default_factory=Prediction, compare=False, repr=False)
    part_of: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        every = any(group.updates == "every" for group in self.groups.values())
        if self.rounds is not None or every or not self.wire.is_exact:
            object.__setattr__(self, "exact", False)  # whatever an edited file says

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best plan of every strategy, priced; those of strategies other than the one asked for when first read."""
        return self.prediction.candidates

    @property
    def step_seconds(self) -> float:
        """A simulated step (s): as the planner compared it, or else of the program that it makes."""
        return self.prediction.step_seconds or self.prediction.simulated_seconds

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.step_seconds if self.step_seconds else 0.0

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

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Role, as decided -> the consecutive roles that it was divided into; itself where it was not."""
        found: dict[str, tuple[str, ...]] = {}
        for role in self.roles:
            own = self.part_of.get(role, role)
            found[own] = (*found.get(own, ()), role)
        return found

    @cached_property
    def decided(self) -> Plan:
        """The plan as decided, whose roles are whole."""
        if not self.part_of:
            return self
        whole = [role for role in self.roles if role not in self.part_of]
        places = self.placements.items()
        return replace(
            self,
            roles={role: self.roles[role] for role in whole},
            batch_offsets={role: self.batch_offsets[role] for role in whole},
            groups={role: self.groups[role] for role in whole if role in self.groups},
            placements={name: replace(place, role=self.part_of.get(place.role, place.role)) for name, place in places},
            part_of={},
        )

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
    def deals(self) -> bool:
        """Whether ranks train subnets, whose neurons are dealt to them in each round."""
        return any(place.holding == "subnet" for place in self.placements.values())

    def owners(self, role: str, rank: int) -> tuple[int, ...]:
        """The ranks over which the sharded parameters of a role are divided; those of subnets between rounds."""
        return self.roles[role] if self.deals else self.group(role, rank)

    def interval(self, role: str, rank: int) -> tuple[int, int]:
        """The examples of the global batch that `rank` works on in `role`: first, one past the last."""
        k = self._positions[role][rank]
        return self.batch_offsets[role][k], self.batch_offsets[role][k + 1]

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

    @cached_property
    def _positions(self) -> dict[str, dict[int, int]]:
        """Role -> rank -> its place in the role."""
        return {role: {rank: k for k, rank in enumerate(ranks)} for role, ranks in self.roles.items()}

    def batch(self, role: str, rank: int, microbatch: int | None = None) -> int:
        """Examples of `rank` itself in `role`; microbatch: those of one."""
        start, stop = self.pieces(role, rank).positions(self.interval(role, rank), microbatch)
        return stop - start

    def largest_batch(self, role: str) -> int:
        """Examples of the busiest rank of `role`."""
        return max(self.batch(role, rank) for rank in self.roles[role])

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

    @property
    def in_pieces(self) -> bool:
        """Whether the batch goes through the roles in pieces, one after another."""
        return self.microbatches > 1

    def ordered(self, pieces: int, schedule: str) -> Plan:
        """The plan with so many microbatches, in place of those of its groups."""
        groups = {role: replace(group, scheme="BK") for role, group in self.groups.items()}
        return replace(self, groups=groups, microbatches=pieces, schedule=schedule)

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

    @cached_property
    def ranks_by_roles(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The combinations of roles that ranks have -> those ranks.  Ranks of one combination run one program."""
        found: dict[tuple[str, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self.duties(rank), []).append(rank)
        order = list(self.all_roles)
        by_role = sorted(found.keys() - {()}, key=lambda roles: [order.index(role) for role in roles])
        return {roles: tuple(found[roles]) for roles in by_role}

    def to_json(self) -> str:
        """Text that `from_json` reads back; same plan, same text."""
        data = {"schema": 1, "hash": self.hash, **self.decision, **self.prediction.to_dict()}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan, with what the text leaves out where the rest implies it.

        Layers may be patterns, and without `examples` there are no `batch_offsets`: `UsePlan` completes both for a
        model.  Raises LaunchError when the text is no plan of this version.
        """
        try:
            data: dict[str, Any] = dict(json.loads(text))
            schema = data["schema"]
        except (ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"this is not a plan of splitc: {error}; compile the model again") from error
        if schema != 1:
            raise LaunchError("plan.json was written by another splitc, with another schema than 1; compile again")
        plan, problems = cls.from_dict(data)
        if problems:
            wrong = "; ".join(map(str, problems))
            raise LaunchError(f"this is not a plan of splitc: {wrong}; compile the model again")
        return plan

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> tuple[Plan, list[Problem]]:
        """The plan that the values of a plan.json make, as far as they can be read, and what is wrong with them."""
        decision, problems = read_decision(hints_of(cls), data)
        prediction, of_prediction = Prediction.from_dict(data)
        return cls(**decision, prediction=prediction), [*problems, *of_prediction]

    @cached_property
    def decision(self) -> dict[str, Any]:
        """All fields but the prediction, under their names in plan.json."""
        decided = asdict(replace(self.decided, placements={}, prediction=Prediction()))
        for layer, place in self.decided.placements.items():
            parts = vars(place).items()
            decided["placements"][layer] = {k: v for k, v in parts if v is not None or k not in ("state", "arrives")}
        if self.rounds is not None and self.rounds.patience is None:
            del decided["rounds"]["patience"]
        usual = {each.name for each in fields(self) if getattr(self, each.name) == each.default}
        left_out = {"prediction", "part_of", *usual.intersection(_WHERE_UNUSUAL)}
        return {KEYS.get(name, name): value for name, value in decided.items() if name not in left_out}

    @property
    def hash(self) -> str:
        """Twelve hex digits of everything that decides the generated programs."""
        return hashlib.sha256(json.dumps(self.decision, sort_keys=True).encode()).hexdigest()[:12]
