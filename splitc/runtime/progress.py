"""Where a rank is in its rounds of local updates, and what begins and ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from .rank import Rank
from .role_comm import RoleComm
from .spec import StepContext


class RoundProgram(Protocol):
    """What a generated module of a plan with rounds has besides its step."""

    begin_round: Callable[..., None]
    end_round: Callable[..., None]


class Progress:
    """The rounds of a worker; without rounds in its plan none ever runs.

    rounds: how many have ended.  running: whether one has begun and not ended.
    """

    def __init__(self, program: Any, rank: Rank, stage: nn.Module) -> None:
        self._program: RoundProgram = program
        self._rank, self._stage = rank, stage
        self._plan = rank.spec.rounds
        unit = rank.spec.roles[0].unit
        self._readers = [k for k, reader in enumerate(rank.spec.readers) if reader in unit]
        self.rounds = self._updates = self._own = self._all = 0
        self.running = False

    def begin(self, comms: Sequence[RoleComm]) -> None:
        """Begin a round unless one is running.  Within a step."""
        if self._plan is not None and not self.running:
            self._program.begin_round(*comms, self._stage)
            self.running = True

    def ends_with(self, is_update: bool) -> bool:
        """Whether the round ends after the step to come.  is_update: whether that ends with an update."""
        return self._plan is not None and is_update and self._updates + 1 == self._plan.steps

    def count(self, offsets: Sequence[int], is_update: bool) -> None:
        """Count a step whose readers' examples begin at `offsets`."""
        self._own += sum(offsets[k + 1] - offsets[k] for k in self._readers)
        self._all += offsets[-1]
        self._updates += is_update

    def end(self, context: StepContext) -> None:
        """End the running round, if there is one, though it may be short of updates.  Collective, between steps."""
        if not self.running:
            return
        with self._rank.step(replace(context, share=self._own / self._all)) as comms:
            self._program.end_round(*comms, self._stage)
        self.rounds += 1
        self._updates = self._own = self._all = 0
        self.running = False
