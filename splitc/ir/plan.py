"""The Plan: which ranks run which layers, how parameters are held and how gradients are summed.

A plan is plain data, independent of torch: it is printed, compared, written to `plan.json` and read back.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

from splitc.errors import LaunchError
from splitc.ir.decode import Limit, Problem, at_least, hints_of, one_of
from splitc.ir.placements import ALL_REDUCES, SCHEDULES, Grouping, LayerPlacement
from splitc.ir.plan_defaults import KEYS, read_decision
from splitc.ir.plan_ranks import SERVER as SERVER
from splitc.ir.plan_ranks import Ranks
from splitc.ir.prediction import Candidate, Prediction
from splitc.runtime.spec import Rounds
from splitc.runtime.transport.formats import AS_COMPUTED, Wire

MOST_RANKS = 100_000
_WHERE_UNUSUAL = ("rounds", "insert_norm", "schedule", "accumulate", "bucket_bytes", "wire", "sum_shares")
_ROLES = Limit(bool, 'of the ranks of each role, as {"trunk": [0, 1], "head": [2]}')


@dataclass(frozen=True)
class Plan(Ranks):
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
        by_role = {"roles": self.roles, "batch_offsets": self.batch_offsets, "groups": self.groups}
        own: Any = {name: {role: each[role] for role in whole if role in each} for name, each in by_role.items()}
        places = {name: replace(p, role=self.part_of.get(p.role, p.role)) for name, p in self.placements.items()}
        return replace(self, **own, placements=places, part_of={})

    def ordered(self, pieces: int, schedule: str) -> Plan:
        """The plan with so many microbatches, in place of those of its groups."""
        groups = {role: replace(group, scheme="BK") for role, group in self.groups.items()}
        return replace(self, groups=groups, microbatches=pieces, schedule=schedule)

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
