"""What a feature of training trains in one process, beside which `verify` trains the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar

from torch import Tensor, nn

from splitc.features import parts
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.verify.replay import Replay, Trained

STATISTICS = ("running_mean", "running_var")


class Joint:
    """Units of ranks that one process trains in turn, and what they make of it together: here the one unit of all.

    separates: whether each unit begins with what it had.  has_gradients: whether its gradients are those of the ranks.
    alike: what units have alike when a cycle begins.
    """

    separates: ClassVar[bool] = False
    has_gradients: ClassVar[bool] = True

    def __init__(self, program: LoweredProgram, model: nn.Module, units: Sequence[Trained]) -> None:
        self.program, self.model, self.units = program, model, units
        self.alike = set(units[0].state)

    def replay(self, number: int, unit: int, step: int) -> Replay:
        """The mode of a step of a unit, in a cycle."""
        return Replay(self.units[unit], step)

    def end(self, number: int, before: dict[str, Tensor]) -> None:
        """Join the units at the end of a cycle.  before: what they had alike at its beginning."""


class Feature:
    """A feature's part of verification; what it leaves out does not concern it."""

    def joint(self, program: LoweredProgram) -> type[Joint] | None:
        """How the units of a program are joined."""
        return None

    def period(self, plan: Plan) -> int:
        """Steps of a cycle that is verified."""
        return 1

    def units(self, plan: Plan) -> str:
        """What is trained in turn, in a word."""
        return ""

    def notes(self, plan: Plan) -> Iterator[str]:
        """Yield what is not verified, or otherwise."""
        yield from ()


@cache
def features() -> tuple[Feature, ...]:
    """Those of the registry."""
    return tuple(part.FEATURE for part in parts("splitc.verify", "feature"))


def joint_of(program: LoweredProgram, model: nn.Module, units: Sequence[Trained]) -> Joint:
    """The units of a program, as the first feature joins them that does."""
    found = next(filter(None, (feature.joint(program) for feature in features())), Joint)
    return found(program, model, units)
