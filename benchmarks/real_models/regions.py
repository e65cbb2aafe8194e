"""The parts of a program that stay the user's own code, and how much of the model they are."""

from __future__ import annotations

from dataclasses import dataclass

from splitc.ir.program import Program


@dataclass(frozen=True)
class Regions:
    """number: how many.  parameters, flops: their share of the model's, 0 to 1."""

    number: int = 0
    parameters: float = 0.0
    flops: float = 0.0

    @property
    def large(self) -> bool:
        """Whether more than a tenth of the model is in them."""
        return max(self.parameters, self.flops) > 0.1


def regions_of(program: Program) -> Regions:
    """The regions of a program."""
    return Regions()
