"""What strategies have in common in which units of ranks may train by themselves for some updates, a round."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated

from splitc.errors import PlacementError
from splitc.ir.decode import at_least
from splitc.ir.plan import Plan
from splitc.ir.rounds.problems import rounds_problems
from splitc.passes.planner.divisions import Division
from splitc.passes.planner.request import Request, largest
from splitc.passes.planner.strategy import Count, Flag, Strategy
from splitc.runtime.spec import Rounds


@dataclass(frozen=True, kw_only=True)
class InRounds(Strategy):
    """Base of strategies in which units of ranks may train by themselves, and average after each `period` updates.

    outer_lr, outer_momentum, nesterov: of an outer SGD, to which the averaged change is a gradient (DiLoCo); nesterov
    is the rule where there is momentum.
    fragments: parts of the model that are averaged in turns; delay: updates that one travels; mixing: how much of its
    own parameters a rank keeps when one arrives (streaming DiLoCo); unless given, what it trained meanwhile is added.
    through: "peers", or a "server", the ranks of the first unit (SplitBrain 4).
    patience: seconds after which units go on without those that are late; None: they wait.
    """

    period: Count | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: Flag | None = None
    fragments: Count | None = None
    delay: Annotated[int, at_least(0)] | None = None
    mixing: float | None = None
    through: str | None = None
    patience: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (rounds := self.rounds(unit=1)) is not None and (problems := list(rounds_problems(rounds))):
            raise PlacementError(f"{self.name}: {'; '.join(problems)}")

    def rounds(self, unit: int) -> Rounds | None:
        """The rounds of units of so many ranks; None without a period."""
        own = fields(InRounds)[len(fields(Strategy)) + 1 :]
        given = {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) is not None}
        if given and self.period is None:
            raise PlacementError(f"{self.name}: {next(iter(given))} needs a period, the updates between two averages")
        usual = {"nesterov": bool(self.outer_momentum)}
        return None if self.period is None else Rounds(self.period, unit, **{**usual, **given})

    def unit(self, request: Request) -> int:
        """The ranks of a unit."""
        return 1

    def in_unit(self, request: Request) -> Request:
        if self.period is None:
            return request
        unit = self.unit(request)
        return replace(request, world=unit, global_batch=unit * largest(request.bounds(request.world)))

    def in_world(self, request: Request, plan: Plan, division: Division) -> Plan:
        return plan if self.period is None else self.repeated(request, plan, division.roles[-1].group)

    def repeated(self, request: Request, plan: Plan, unit: int) -> Plan:
        """The plan of all ranks, of one of the first `unit` of them: every unit does the same on its own examples."""
        units, size = request.world // unit, plan.global_batch
        starts = request.bounds(request.world)[::unit] if request.global_batch else range(0, size * units + 1, size)
        alone = {layer: place for layer, place in plan.placements.items() if place.sync == "none" and units > 1}
        averaged = {layer: replace(alone[layer], sync="average") for layer in alone if request.gradient_of(layer)}

        def on_all(ranks: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(rank + first for first in range(0, request.world, unit) for rank in ranks)

        def of_all(bounds: tuple[int, ...]) -> tuple[int, ...]:
            return (0, *(a - (a - b) * end // size for a, b in pairwise(starts) for end in bounds[1:]))

        return replace(
            plan,
            strategy=self.name,
            world=request.world,
            roles={role: on_all(ranks) for role, ranks in plan.roles.items()},
            batch_offsets={role: of_all(bounds) for role, bounds in plan.batch_offsets.items()},
            placements={**plan.placements, **averaged},
            rounds=self.rounds(unit),
        )
