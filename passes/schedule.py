"""Write the action list of each part's step.

This pass rewrites: it fills `RankProgram.actions`.  One batch goes forward through the roles in the order of the plan
and back; a rank that is in several roles does for each what ranks of that role alone do, in that order:

    conv   send target -> fc, forward, send cut0 -> fc, sum_loss, recv_grad cut0 <- fc, backward (reduce buckets)
    fc     recv target <- conv, recv cut0 <- conv, forward, sum_loss, backward (reduce buckets), send_grad cut0 -> conv

Inputs are sent before the role computes, so that they are on their way meanwhile.  `reduce bucketN` after `backward`
means: started as backward fills it, finished there.  The role of the loss goes forward and backward once for each turn
of its groups; gradients add up over the turns (SplitBrain 3.1):

    fc     modulo cut0 [k], modulo target [k], forward [k], backward [k], modulo_grad cut0 [k]     for every turn k
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.checks.graph import no_deadlock, sends_meet_receives, served_buckets_travel, stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.actions import Action
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, RankProgram, Stage
from splitc.ir.tied import tied


@dataclass(frozen=True)
class Schedule(Pass[LoweredProgram, LoweredProgram]):
    """One batch at a time: forward through all roles, then backward."""

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (
        actions_are_complete,
        sends_meet_receives,
        no_deadlock,
        served_buckets_travel,
    )

    def run(self, program: LoweredProgram) -> LoweredProgram:
        return replace(
            program,
            rank_programs=tuple(replace(p, actions=tuple(_actions(program, p))) for p in program.rank_programs),
        )


def _actions(program: LoweredProgram, part: RankProgram) -> Iterator[Action]:
    stages = [program.stage(role) for role in part.roles if role != SERVER]
    serves = part.roles == (SERVER,)  # a server beside a worker serves while it pulls and pushes itself
    if serves:
        yield Action("send_parameters", own=SERVER)
    for stage in stages:
        if stage.served:
            yield Action("pull", own=stage.role)
    for role in program.plan.roles:
        yield from _forward(program, part, role)
    with_loss = next((stage for stage in stages if stage.has_loss), None)
    yield Action("sum_loss", own=with_loss.role if with_loss else part.roles[-1])
    for role in reversed(list(program.plan.roles)):
        yield from _backward(program, part, role)
    for k, ranks in enumerate(tied(program).values()):
        if set(part.ranks) <= set(ranks):
            yield Action("all_reduce_tied", f"tied{k}", own=part.roles[0])
    if serves:
        yield Action("reduce_gradients", own=SERVER)


def _forward(program: LoweredProgram, part: RankProgram, role: str) -> Iterator[Action]:
    """What a rank does while `role` goes forward: as one of it, and as one of those that it sends to.

    Every rank takes a value at the same place in its order, whatever it does besides: so no two of them wait for each
    other.
    """
    stage, inside = program.stage(role), role in part.roles
    yield from _crossing(part, [cut for cut in stage.sends if cut.value in stage.inputs])
    if inside:
        yield from _run(program, stage)
    yield from _crossing(part, [cut for cut in stage.sends if cut.value not in stage.inputs])


def _crossing(part: RankProgram, cuts: Iterable[Cut]) -> Iterator[Action]:
    """Send what the part makes, and take what it needs, of one role's cuts."""
    for cut in cuts:
        if cut.producer in part.roles:
            if cut.leaves:
                yield Action("slice_batch", cut.name, own=cut.producer)
            if not cut.local:
                yield Action("send", cut.name, cut.consumer, cut.producer)
        if cut.consumer in part.roles and not cut.local:
            yield Action("recv", cut.name, cut.producer, cut.consumer)


def _run(program: LoweredProgram, stage: Stage) -> Iterator[Action]:
    """A stage's forward, in turns with its backward where its groups work in turns."""
    number = program.num_microbatches(stage)
    for turn in range(number):
        for cut in stage.receives:
            if cut.enters:
                yield Action("modulo", cut.name, own=stage.role, turn=turn)
        yield Action("forward", own=stage.role, turn=turn)
        if number > 1:
            yield from _turn_back(program, stage, turn, turn == number - 1)


def _backward(program: LoweredProgram, part: RankProgram, role: str) -> Iterator[Action]:
    """What a rank does while `role` goes backward, and the gradients of what it received go back."""
    stage = program.stage(role)
    if role in part.roles:
        arrives = [cut for cut in stage.sends if cut.gradient and cut.value not in stage.inputs]
        for cut in reversed(arrives):
            if cut.leaves:
                yield Action("all_gather_grad", cut.name, own=role)
        if program.num_microbatches(stage) == 1 and (stage.has_loss or arrives):
            yield from _turn_back(program, stage, 0, last=True)
    for cut in reversed(stage.receives):
        if not cut.gradient or cut.local:
            continue
        if role in part.roles:
            yield Action("send_grad", cut.name, cut.producer, role)
        if cut.producer in part.roles:
            yield Action("recv_grad", cut.name, role, cut.producer)


def _turn_back(program: PlacedProgram, stage: Stage, turn: int, last: bool) -> Iterator[Action]:
    own = stage.role
    grouping = program.plan.groups.get(own)
    every = grouping is not None and grouping.updates == "every"
    returns = [cut for cut in stage.receives if cut.gradient]
    if not returns and not any(program.tensors[h].trainable for h in stage.tensors):
        return
    yield Action("backward", own=own, turn=turn)
    if last or every:
        for k in range(len(stage.buckets)):
            yield Action("all_reduce", f"bucket{k}", own=own, turn=turn)
        for k in range(len(stage.served)):
            yield Action("push", f"bucket{k}", own=own, turn=turn)
    if any(node.target is comm_ops.late_multiply for node in stage.graph.nodes):
        yield Action("multiply", own=own, turn=turn)
    for cut in reversed(returns):
        if cut.enters:
            yield Action("modulo_grad", cut.name, own=own, turn=turn)
    if every and any(program.tensors[h].trainable for h in stage.tensors):
        yield Action("update", own=own, turn=turn)
