"""Fill `program.costs`: what every layer computes, moves and keeps at any batch, and takes on this machine if asked.

This pass decides nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import graph_is_sound, has_costs
from splitc.cost_models.compute.cost_cache import cached_layer_costs
from splitc.cost_models.profiling.measured import measure_layers
from splitc.errors import CostError
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import Program
from splitc.ir.regions import regions

COUNTED, MEASURED = "counted", "measured"
"""What layers are priced by: their FLOPs and bytes, or the time that they take on this machine."""


def require_costs(costs: str) -> None:
    """Raise CostError for another word than those."""
    if costs not in (COUNTED, MEASURED):
        raise CostError(f'costs={costs!r}: there are "{COUNTED}" (FLOPs and bytes) and "{MEASURED}" (on this machine)')


@dataclass(frozen=True)
class MeasureCosts(Pass[Program, Program]):
    """Count every layer on fake tensors; with "measured" costs, run it on this machine too."""

    requires: ClassVar[tuple[Check, ...]] = (graph_is_sound,)
    ensures: ClassVar[tuple[Check, ...]] = (has_costs,)

    costs: str = COUNTED

    def run(self, program: Program) -> Program:
        if self.costs == MEASURED and (own := next(regions(program), None)) is not None:
            raise CostError(
                f"{own[1].path or program.name} stays the user's own code ({own[1].why}), which is not run to measure "
                f'it; use counted costs (costs="counted")'
            )
        counted = cached_layer_costs(program)
        return replace(program, costs=measure_layers(program, counted) if self.costs == MEASURED else counted)
