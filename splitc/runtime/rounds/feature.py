"""Rounds of local updates: what generated code calls in them, where a rank is, and what begins and ends one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ..comm.role import Part
from ..moments import Batch, Feature
from ..spec import RankSpec, StepContext
from ..weights import named_tensors
from .averaging import Averages
from .late import LateAverages, late_averages

Buckets = Sequence[Sequence[str]]


class RoundComm(Part):
    """A role's exchanges with other units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.averages = Averages(self.role)

    def keep(self, stage: nn.Module, buckets: Buckets, fragments: Sequence[int] = (), **rule: Any) -> None:
        """Keep the parameters that the outer optimizer is to update by the averaged change of the round.

        fragments: of the buckets, where units may be late.  rule: lr, momentum and nesterov.
        """
        self.averages.keep(tensors := _tensors(stage, buckets), **rule)
        if isinstance(self.averages, LateAverages):
            self.averages.open(tensors, fragments)

    def average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, optimizer: bool = False) -> None:
        """Average parameters, and statistics of normalisations, over all units, weighted by their examples.

        What travels arrives first; what was not trained since is not averaged again.
        optimizer: the floating state of their optimizer too.
        """
        share, values = self.role.context.shares[fragment], _tensors(stage, buckets)
        if optimizer:
            states = ([self._floating_state(tensor) for tensor in bucket] for bucket in values)
            values += [[value for found in bucket for value in found] for bucket in states]
        self.averages.join([each for each in values if each], fragment, share)

    def start_average(self, stage: nn.Module, buckets: Buckets, fragment: int = 0, mixing: float | None = None) -> None:
        """Start to average a fragment, which `arrive` waits for some updates later."""
        self.averages.start(_tensors(stage, buckets), fragment, self.role.context.shares[fragment], mixing)

    def arrive(self, fragment: int) -> None:
        """Wait for a fragment, and join it with what this rank trained meanwhile."""
        self.averages.arrive(fragment)

    def _floating_state(self, tensor: Tensor) -> list[Tensor]:
        """The optimizer's state of a tensor but for counters."""
        state = self.role.optimizer_state(tensor) if isinstance(tensor, nn.Parameter) else {}
        found = (value for _, value in sorted(state.items(), key=lambda item: item[0]))
        return [value for value in found if isinstance(value, Tensor) and value.shape == tensor.shape]


def _tensors(stage: nn.Module, buckets: Buckets) -> list[list[Tensor]]:
    tensors = named_tensors(stage)
    return [[tensors[name] for name in names] for names in buckets]


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
