"""What one process trains in place of the ranks, as a feature of training has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor, nn

from splitc.features import parts
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.verify.replay import Replay, Unit

STATISTICS = ("running_mean", "running_var")


class Joint:
    """Units of ranks that one process trains in turn, and what they make of it together: here the one unit of all.

    what: is trained in turn, in a word.  separates: whether each unit begins with what it had.
    has_gradients: whether its gradients are those of the ranks.  alike: what units have alike when a cycle begins.
    """

    what: ClassVar[str] = ""
    separates: ClassVar[bool] = False
    has_gradients: ClassVar[bool] = True

    def __init__(self, program: LoweredProgram, model: nn.Module, units: Sequence[Unit]) -> None:
        self.program, self.model, self.units = program, model, units
        self.alike = set(units[0].state)

    @staticmethod
    def concerns(program: LoweredProgram) -> bool:
        """Whether the units of a program are joined so."""
        return True

    @staticmethod
    def period(plan: Plan) -> int:
        """Steps of a cycle that is verified."""
        return 1

    @staticmethod
    def notes(plan: Plan) -> Iterator[str]:
        """Yield what is not verified, or otherwise."""
        yield from ()

    def replay(self, number: int, unit: int, step: int) -> Replay:
        """The mode of a step of a unit, in a cycle."""
        return Replay(self.units[unit], step)

    def end(self, number: int, before: dict[str, Tensor]) -> None:
        """Join the units at the end of a cycle.  before: what they had alike at its beginning."""


def joint_of(program: LoweredProgram) -> type[Joint]:
    """How the first feature joins the units of a program that does."""
    own = (part.JOINT for part in parts("splitc.verify", "feature"))
    return next((joint for joint in own if joint.concerns(program)), Joint)
