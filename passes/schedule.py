"""Write the action list of each role's step.

This pass rewrites the stages: it fills `Stage.actions`.  One batch goes forward through the roles in the order of the
plan and back:

    conv   send target -> fc, forward, send cut0 -> fc, sum_loss, recv_grad cut0 <- fc, backward (reduce buckets)
    fc     recv target <- conv, recv cut0 <- conv, forward, sum_loss, backward (reduce buckets), send_grad cut0 -> conv

Inputs are sent before the role computes, so that they are on their way meanwhile.  `reduce bucketN` after `backward`
means: started as backward fills it, finished there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.actions import Action
from splitc.checks import no_deadlock, sends_meet_receives, stages_cover_the_graph
from splitc.pipeline import Check, Pass
from splitc.program import Program, Stage


@dataclass(frozen=True)
class Schedule(Pass):
    """One batch at a time: forward through all roles, then backward."""

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (sends_meet_receives, no_deadlock)

    def run(self, program: Program) -> Program:
        return replace(program, stages=tuple(replace(s, actions=_actions(program, s)) for s in program.stages))


def _actions(program: Program, stage: Stage) -> tuple[Action, ...]:
    inputs = [cut for cut in stage.sends if cut.value in stage.inputs]
    outputs = [cut for cut in stage.sends if cut.value not in stage.inputs]
    trains = any(program.holdings[h].trainable for h in stage.holdings)
    returns = [cut for cut in stage.receives if cut.gradient]
    arrives = [cut for cut in outputs if cut.gradient]
    actions = [Action("recv", cut.name, cut.producer) for cut in stage.receives]
    actions += [Action("send", cut.name, cut.consumer) for cut in inputs]
    actions += [Action("forward")]
    actions += [Action("send", cut.name, cut.consumer) for cut in outputs]
    actions += [Action("sum_loss")]
    actions += [Action("recv_grad", cut.name, cut.consumer) for cut in reversed(arrives)]
    if (trains or returns) and (stage.has_loss or arrives):
        actions += [Action("backward")]
        actions += [Action("reduce", f"bucket{k}") for k in range(len(stage.buckets))]
    actions += [Action("send_grad", cut.name, cut.producer) for cut in reversed(returns)]
    return tuple(actions)
