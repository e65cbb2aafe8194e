"""Fill `program.costs`: what every layer computes, moves and keeps at any batch.  This pass decides nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from cost_models.flops import layer_costs
from splitc.checks import graph_is_sound, has_costs
from splitc.pipeline import Check, Pass
from splitc.program import Program


@dataclass(frozen=True)
class MeasureCosts(Pass):
    """Count every layer on fake tensors."""

    name: ClassVar[str] = "measure-costs"
    requires: ClassVar[tuple[Check, ...]] = (graph_is_sound,)
    ensures: ClassVar[tuple[Check, ...]] = (has_costs,)

    def run(self, program: Program) -> Program:
        return replace(program, costs=layer_costs(program))
