"""Where a rank is in its rounds of local updates, and what begins and ends them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..moments import Batch, Feature
from ..spec import RankSpec, StepContext
from .comm import RoundComm
from .late import late_averages


@dataclass
class InRounds(Feature):
    """The rounds of a rank.

    number: how many have ended.  running: whether one has begun and not ended.
    """

    comm = RoundComm
    name, item = "rounds", "round"
    own_parameters = "in rounds of local updates each unit has parameters of its own"
    own_plan = "rounds of local updates go on under their own plan only; worker.load_state_dict takes the weights alone"

    number: int = field(default=0, init=False)
    running: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        spec = self.training.spec
        assert spec.rounds is not None
        self._plan, unit, self._updates = spec.rounds, spec.roles[0].unit, 0
        self._readers = [k for k, reader in enumerate(spec.readers) if reader in unit]
        self._examples = [(0, 0)] * self._plan.fragments
        patience, parts = self._plan.patience, self.training.parts(RoundComm)
        self._late = [] if patience is None else late_averages([part.role for part in parts], patience)
        for part, each in zip(parts, self._late, strict=False):
            part.averages = each

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        return spec.rounds is not None

    @property
    def is_alike(self) -> bool:
        return not self.running

    @property
    def cycle(self) -> tuple[int, int]:
        return self._plan.steps, self._updates

    def describe(self, context: StepContext) -> StepContext:
        ends = context.training and context.is_last and self._updates + 1 == self._plan.steps
        return replace(context, round=self.number, ends_round=ends)

    def begin(self, comms: Sequence[Any]) -> None:
        if not self.running:
            self.training.program.begin_round(*comms, self.training.stage)
            self.running = True

    def after_update(self, batch: Batch) -> None:
        """Count a step, and exchange what is due after it."""
        _, context = batch
        for each in self._late:
            each.poll()
        own = sum(context.offsets[k + 1] - context.offsets[k] for k in self._readers)
        self._examples = [(mine + own, every + context.offsets[-1]) for mine, every in self._examples]
        self._updates += context.is_last
        if self._plan.in_turns and context.is_last:
            self._take_turns(context)
        elif context.ends_round:
            self.end(context, 0)

    def end(self, context: StepContext, waiting: int) -> None:
        """End the running round, if there is one, though it may be short of updates."""
        if not self.running:
            return
        for each in self._late:
            each.hang_up()
        with self.training.step(replace(context, shares=self._shares())) as comms:
            self.training.program.end_round(*comms, self.training.stage)
        self.number, self._updates, self.running = self.number + 1, 0, False
        self._examples = [(0, 0)] * len(self._examples)

    def _take_turns(self, context: StepContext) -> None:
        """Exchange the fragment whose turn it is; the round goes on until something ends it."""
        with self.training.step(replace(context, shares=self._shares())) as comms:
            self.training.program.after_update(*comms, self.training.stage, self._updates)
        for k in (k for k in range(self._plan.fragments) if self._plan.departure(k) == self._updates):
            self._examples[k] = 0, 0
        if context.ends_round:
            self.number, self._updates = self.number + 1, 0

    def _shares(self) -> tuple[float, ...]:
        return tuple(own / every if every else 0.0 for own, every in self._examples)

    def state_dict(self) -> dict[str, Any]:
        outer = [part.averages.state_dict() for part in self.training.parts(RoundComm)]
        return {"rounds": self.number, "outer": outer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.number = state["rounds"]
        for part, outer in zip(self.training.parts(RoundComm), state["outer"], strict=True):
            part.averages.restore(outer)
