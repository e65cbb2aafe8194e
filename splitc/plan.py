"""The Plan: which ranks run which layers, how parameters are held and how gradients meet.

A plan is plain data, independent of torch: it is printed, compared, written to `plan.json` and read back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from splitc.errors import LaunchError

HOLDINGS = ("replicated", "sharded", "subnet")
SYNCS = ("all_reduce", "late_multiply", "parameter_server", "none")


@dataclass(frozen=True)
class Placement:
    """Where a layer runs (role), how its parameters are held and how its gradients are summed (sync).

    As a pin any part may be None: the planner chooses it.  `group` is the size of a model-parallel group.
    """

    role: str | None = None
    holding: str | None = None
    sync: str | None = None
    group: int | None = None


@dataclass(frozen=True)
class Candidate:
    """The best plan of one strategy, priced.  step_seconds in s; samples_per_second over all ranks."""

    strategy: str
    step_seconds: float
    samples_per_second: float
    global_batch: int
    exact: bool
    feasible: bool
    why: str = ""
    roles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A placement of every layer, the roles, and each rank's part of the global batch.

    roles: role -> its ranks, in the order of the data's way through them; the first role reads the data.
    examples: role -> bounds (0, ..., global_batch); its k-th rank works on examples bounds[k] to bounds[k + 1].
    reasons: layer -> why it was placed so.  seconds: layer -> compute of its busiest rank in one step (s).
    """

    strategy: str
    world: int
    roles: Mapping[str, tuple[int, ...]]
    placements: Mapping[str, Placement]
    examples: Mapping[str, tuple[int, ...]]
    cluster: str
    microbatches: int = 1
    proof: str = "optimal"
    gap: float = 0.0
    step_seconds: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    model: str = ""

    @property
    def reader(self) -> str:
        """The role that reads the data."""
        return next(iter(self.roles))

    @property
    def global_batch(self) -> int:
        return self.examples[self.reader][-1]

    @property
    def samples_per_second(self) -> float:
        return self.global_batch / self.step_seconds if self.step_seconds else 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples that each reader gives to a step."""
        bounds = self.examples[self.reader]
        return tuple(b - a for a, b in pairwise(bounds))

    def role_of(self, rank: int) -> str:
        return next(role for role, ranks in self.roles.items() if rank in ranks)

    def interval(self, rank: int) -> tuple[int, int]:
        """The examples of the global batch that `rank` works on: first, one past the last."""
        role = self.role_of(rank)
        k = self.roles[role].index(rank)
        return self.examples[role][k], self.examples[role][k + 1]

    def batch(self, rank: int) -> int:
        start, stop = self.interval(rank)
        return stop - start

    def largest_batch(self, role: str) -> int:
        """Examples of the busiest rank of `role`."""
        return max(self.batch(rank) for rank in self.roles[role])

    def routes(self, rank: int, role: str) -> tuple[tuple[int, int, int], ...]:
        """(peer, first, one past the last) for every rank of `role` that shares examples with `rank`."""
        start, stop = self.interval(rank)
        shared = (
            (peer, max(start, self.interval(peer)[0]), min(stop, self.interval(peer)[1])) for peer in self.roles[role]
        )
        return tuple((peer, a, b) for peer, a, b in shared if a < b)

    def to_json(self) -> str:
        """Text that `from_json` reads back; same plan, same text."""
        return json.dumps({"schema": 1, "hash": self.hash, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises LaunchError when the text is no plan of this version."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data.pop("schema") != 1:
                raise LaunchError(
                    "plan.json has another schema than 1: it was written by another splitc; compile again"
                )
            data.pop("hash")
            plan = cls(**data)
            return replace(
                plan,
                roles={role: tuple(ranks) for role, ranks in plan.roles.items()},
                examples={role: tuple(bounds) for role, bounds in plan.examples.items()},
                placements={name: Placement(**data["placements"][name]) for name in plan.placements},
                candidates=tuple(_candidate(c) for c in data["candidates"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LaunchError(f"this is not a plan of splitc: {error}; compile the model again") from error

    @property
    def hash(self) -> str:
        """Twelve hex digits of what decides the generated programs: not of prices, reasons or candidates."""
        decided = {
            k: v
            for k, v in asdict(self).items()
            if k in ("world", "roles", "placements", "examples", "microbatches", "model")
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:12]


def _candidate(data: dict[str, Any]) -> Candidate:
    roles = {role: tuple(ranks) for role, ranks in data.pop("roles").items()}
    return Candidate(**data, roles=roles)


def share_out(total: int, parts: int) -> tuple[int, ...]:
    """Bounds of `parts` nearly equal shares of `total`; the first ones are the larger: (10, 3) -> (0, 4, 7, 10)."""
    small, extra = divmod(total, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + small + (part < extra))
    return tuple(bounds)


def serve(bounds: tuple[int, ...], servers: int) -> tuple[int, ...]:
    """Bounds of the examples that each of `servers` ranks takes over from producers with `bounds`.

    Each server takes whole producers while there are enough of them (Stanza 4.1.3), the first ones one more where it
    does not divide; with more servers than producers the examples are shared out evenly.
    """
    producers = len(bounds) - 1
    if servers > producers:
        return share_out(bounds[-1], servers)
    return tuple(bounds[p] for p in share_out(producers, servers))


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`(0, 1, 2)` -> `ranks 0 to 2`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {' '.join(map(str, ranks))}"
