"""Mark what is dealt to the ranks of independent subnets in each round (IST 3.1).

This pass rewrites the stages: it fills `Stage.dealt` and, for the time between rounds, `Stage.shards`, in which ranks
own the dealt tensors, each along its first dealt dim.  The graphs stay as they are: a layer runs on whatever slice of
its parameters a rank has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.graph import stages_cover_the_graph
from splitc.errors import LaunchError
from splitc.ir.graph import copy_graph, update_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.subnets.neurons import find_neurons
from splitc.runtime.collectives.layouts import State


@dataclass(frozen=True)
class DealNeurons(Pass[LoweredProgram, LoweredProgram]):
    """Deal the hidden neurons of the layers that the plan holds as subnets."""

    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)

    def run(self, program: LoweredProgram) -> LoweredProgram:
        if not program.plan.deals:
            return program
        return replace(program, stages=tuple(_dealt(program, stage) for stage in program.stages))


def _dealt(program: LoweredProgram, stage: Stage) -> Stage:
    placements = program.plan.placements
    planned = {name: placements[name].split for name in stage.layers if placements[name].holding == "subnet"}
    if not planned:
        return stage
    dealing = find_neurons(program, stage.graph, program.plan.world)
    if dealing.splits != planned:
        wrong = sorted(name for name in {*dealing.splits, *planned} if dealing.splits.get(name) != planned.get(name))
        raise LaunchError(
            f"placements: the plan holds {', '.join(wrong)} otherwise than as subnets of the neurons that can be dealt"
        )
    graph, _ = copy_graph(stage.graph)
    for node in graph.nodes:
        if node.name in dealing.values:
            update_info(node, state=State.FEATURES)
    owned = {name: min(dims) for name, dims in dealing.tensors.items()}
    return replace(stage, graph=graph, dealt=dealing.tensors, shards=owned)
