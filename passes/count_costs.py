"""Fill `program.costs`: what every layer computes, moves and keeps at any batch.  This pass decides nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import graph_is_sound, has_costs
from splitc.cost_models.compute.cost_cache import cached_layer_costs
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import Program


@dataclass(frozen=True)
class CountCosts(Pass[Program, Program]):
    """Count every layer on fake tensors."""

    requires: ClassVar[tuple[Check, ...]] = (graph_is_sound,)
    ensures: ClassVar[tuple[Check, ...]] = (has_costs,)

    def run(self, program: Program) -> Program:
        return replace(program, costs=cached_layer_costs(program))
