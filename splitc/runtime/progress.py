"""Where a rank is in its rounds of local updates, and what begins and ends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from .errors import LaunchError
from .rank import Rank
from .role_comm import RoleComm
from .spec import RankSpec, Rounds, StepContext


class GeneratedModule(Protocol):
    """A generated `rankN.py`.

    begin_round, end_round: of a plan with rounds.  after_update: only where fragments take turns; called with the
    number of the update in its round.
    """

    rank: RankSpec
    Stage: Any
    step: Any
    evaluate: Any
    predict: Any
    begin_round: Any
    end_round: Any
    after_update: Any


class Progress:
    """The rounds of a worker; without rounds in its plan none ever runs.

    rounds: how many have ended.  running: whether one has begun and not ended.
    """

    def __init__(self, program: GeneratedModule, rank: Rank, stage: nn.Module) -> None:
        self._program, self._rank, self._stage = program, rank, stage
        self._plan = rank.spec.rounds
        unit = rank.spec.roles[0].unit
        self._readers = [k for k, reader in enumerate(rank.spec.readers) if reader in unit]
        self.rounds = self._updates = 0
        self._examples = [(0, 0)] * (self._plan.fragments if self._plan else 1)
        self.running = False

    def begin(self, comms: Sequence[RoleComm]) -> None:
        """Begin a round unless one is running.  Within a step."""
        if self._plan is not None and not self.running:
            self._program.begin_round(*comms, self._stage)
            self.running = True

    def ends_with(self, is_update: bool) -> bool:
        """Whether the round ends after the step to come.  is_update: whether that ends with an update."""
        return self._plan is not None and is_update and self._updates + 1 == self._plan.steps

    def count(self, context: StepContext) -> None:
        """Count a step, and exchange what is due after it.  Collective, between steps."""
        own = sum(context.offsets[k + 1] - context.offsets[k] for k in self._readers)
        self._examples = [(mine + own, every + context.offsets[-1]) for mine, every in self._examples]
        self._updates += context.is_last
        if self._plan is not None and self._plan.in_turns and context.is_last:
            self._take_turns(self._plan, context)
        elif context.ends_round:
            self.end(context)

    def end(self, context: StepContext, waiting: int = 0) -> None:
        """End the running round, if there is one, though it may be short of updates.  Collective, between steps.

        waiting: batches that are accumulated to an update to come; gradients of slices would be lost.
        """
        if not self.running:
            return
        if waiting and self._rank.spec.evaluated:
            raise LaunchError(
                f"{waiting} accumulated batches wait for their update, and a round of subnets that ends now would lose "
                f"their gradients; save, load and evaluate after an update"
            )
        with self._rank.step(replace(context, shares=self._shares())) as comms:
            self._program.end_round(*comms, self._stage)
        self.rounds += 1
        self._updates = 0
        self._examples = [(0, 0)] * len(self._examples)
        self.running = False

    def _take_turns(self, plan: Rounds, context: StepContext) -> None:
        """Exchange the fragment whose turn it is; the round goes on until something ends it."""
        with self._rank.step(replace(context, shares=self._shares())) as comms:
            self._program.after_update(*comms, self._stage, self._updates)
        for k in (k for k in range(plan.fragments) if plan.departure(k) == self._updates):
            self._examples[k] = 0, 0
        if context.ends_round:
            self.rounds, self._updates = self.rounds + 1, 0

    def _shares(self) -> tuple[float, ...]:
        return tuple(own / every if every else 0.0 for own, every in self._examples)

    def state_dict(self) -> dict[str, Any]:
        """What the rounds to come depend on: numbers, and tensors by name."""
        return {"rounds": self.rounds, "outer": [comm.averages.state_dict() for comm in self._rank.comms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was; no round may be running."""
        self.rounds = state["rounds"]
        for comm, outer in zip(self._rank.comms, state["outer"], strict=True):
            comm.averages.restore(outer)
