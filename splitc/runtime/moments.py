"""The three moments of a step at which a feature of training takes part, and what it does between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from .comm.role import Part
from .parameter_groups import Named, OptimizerFactory, Whole
from .spec import RankSpec, StepContext

Batch = tuple[tuple[Tensor, ...], StepContext]
"""This rank's part of a batch, and the step that evaluates it."""


class Training(NamedTuple):
    """What a feature has of a rank's training.

    program: its generated module.  parts: gives what each of its roles has of a class.
    step: around what is issued in a step, as `Rank.step`.  loss: of a batch in evaluation mode.
    """

    program: Any
    spec: RankSpec
    stage: nn.Module
    parts: Callable[[type[Any]], list[Any]]
    step: Callable[[StepContext], AbstractContextManager[Sequence[Any]]]
    loss: Callable[[tuple[Tensor, ...], StepContext], Tensor]


@dataclass
class Feature:
    """A feature of training; what it leaves out is not done.  All is called on every rank in one order.

    comm: what generated code calls for it.  name: in texts, and in what a checkpoint says of its run; "" where neither
    needs it.  item: of its state in a rank's part of a checkpoint.
    own_parameters: why replicas have parameters of their own between steps, where they do.
    own_plan: why a checkpoint is resumed under its own plan only, where it is.
    """

    training: Training

    comm: ClassVar[type[Part] | None] = None
    name: ClassVar[str] = ""
    item: ClassVar[str] = ""
    own_parameters: ClassVar[str] = ""
    own_plan: ClassVar[str] = ""

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        """Whether a rank's plan has it; that is alike on all ranks but for those without work."""
        return False

    @staticmethod
    def check_optimizer(factory: OptimizerFactory, whole: Whole, named: Named) -> None:
        """Raise LaunchError for an optimizer with which it cannot train."""

    # -- the moments ---------------------------------------------------------------------------------------------------

    def describe(self, context: StepContext) -> StepContext:
        """The step to come, with what it says of it."""
        return context

    def begin(self, comms: Sequence[Any]) -> None:
        """Before the generated step."""

    def after_backward(self, context: StepContext) -> None:
        """After it, when this rank's gradients are there, and before they are checked and clipped."""

    def after_update(self, batch: Batch) -> None:
        """After the update, if the step ends with one."""

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def is_alike(self) -> bool:
        """Whether all ranks that hold a parameter have the same values of it now."""
        return True

    @property
    def cycle(self) -> tuple[int, int]:
        """The updates in which all happens that it does, and those made of them."""
        return 1, 0

    def end(self, context: StepContext, waiting: int) -> None:
        """Let all ranks have the same parameters.  waiting: batches that are accumulated to an update to come."""

    def settle(self, sample: Sequence[Batch] | None) -> None:
        """Make what is read between steps, of a sample of batches or of the last ones."""

    def forget(self) -> None:
        """Parameters or their state are about to be overwritten."""

    def state_dict(self) -> dict[str, Any]:
        """What the steps to come depend on: numbers, and tensors by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another run was, between rounds of it."""
