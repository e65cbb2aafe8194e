"""Write the action list of each rank program's step.

This pass rewrites: it fills `RankProgram.actions`.  One batch goes forward through the roles in the order of the plan
and back; a rank in several roles does for each what a rank of that role alone does, in that order:

    conv   send target -> fc, forward, send cut0 -> fc, sum_loss, recv_grad cut0 <- fc, backward, all_reduce bucket0
    fc     recv target <- conv, recv cut0 <- conv, forward, sum_loss, backward, all_reduce bucket0,
           send_grad cut0 -> conv

Inputs are sent before the role computes, so that they travel meanwhile.  An `all_reduce` after `backward` begins when
backward has filled the bucket, and ends there; late-multiplied layers `multiply` meanwhile.  The role of the loss goes
forward and backward once for each microbatch of its groups; gradients add up over the microbatches (SplitBrain 3.1):

    fc     modulo cut0 [k], modulo target [k], forward [k], backward [k], modulo_grad cut0 [k]    for each microbatch k
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.checks.graph import stages_cover_the_graph
from splitc.ir import comm_ops
from splitc.ir.actions import Action, RankProgram
from splitc.ir.dealt import fetches_ahead
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, Stage
from splitc.ir.rounds import exchanges
from splitc.ir.transitions import name_of


@dataclass(frozen=True)
class Schedule(Pass[LoweredProgram, LoweredProgram]):
    """Schedule one batch at a time: forward through all roles, then backward."""

    name: ClassVar[str] = "schedule"
    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (actions_are_complete, sends_meet_receives, no_deadlock)

    def run(self, program: LoweredProgram) -> LoweredProgram:
        scheduled = (replace(each, actions=tuple(_actions(program, each))) for each in program.rank_programs)
        return replace(program, rank_programs=tuple(scheduled))


def _actions(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
    roles, plan = rank_program.roles, program.plan
    stages = [program.stage(role) for role in roles if role != SERVER]
    dedicated = roles == (SERVER,)  # a rank that is a worker too serves while it pulls and pushes
    if dedicated:
        yield Action("send_parameters", role=SERVER)
    yield from (Action("deal", role=stage.role) for stage in stages if stage.dealt)
    yield from (Action("fetch_ahead", role=stage.role) for stage in stages if fetches_ahead(stage))
    yield from (Action("pull", role=stage.role) for stage in stages if stage.served)
    for role in plan.roles:
        yield from _forward(program, rank_program, role)
    with_loss = next((stage for stage in stages if stage.has_loss), None)
    yield Action("sum_loss", role=with_loss.role if with_loss else roles[-1])
    for role in reversed(list(plan.roles)):
        yield from _backward(program, rank_program, role)
    for name, ranks in program.tied.items():
        if set(rank_program.ranks) <= set(ranks):
            yield Action("all_reduce_tied", name, role=roles[0])
    if dedicated:
        yield Action("reduce_gradients", role=SERVER)
    yield from (Action("collect", role=stage.role) for stage in stages if stage.dealt)
    yield from (action for stage in stages for action in exchanges(plan.rounds, stage))


def _forward(program: LoweredProgram, rank_program: RankProgram, role: str) -> Iterator[Action]:
    """Yield what a rank does while `role` goes forward: as one of it, and as one of the roles that it sends to.

    Every rank receives a value at the same point of its list, whatever else it does, so no two wait for each other.
    """
    stage = program.stage(role)
    yield from _cross(rank_program, (cut for cut in stage.sends if cut.value in stage.inputs))
    if role in rank_program.roles:
        yield from _run(program, stage)
    yield from _cross(rank_program, (cut for cut in stage.sends if cut.value not in stage.inputs))


def _cross(rank_program: RankProgram, cuts: Iterable[Cut]) -> Iterator[Action]:
    """Bring cuts to their consumer's role; its groups gather them when they compute."""
    for cut in cuts:
        produces, consumes = (role in rank_program.roles for role in (cut.producer, cut.consumer))
        if cut.sent and produces:
            yield Action("send", cut.name, cut.consumer, cut.producer)
        if cut.sent and consumes:
            yield Action("recv", cut.name, cut.producer, cut.consumer)


def _run(program: LoweredProgram, stage: Stage) -> Iterator[Action]:
    """Yield a stage's forward; with several microbatches each one's backward follows its forward."""
    number = program.num_microbatches(stage)
    for k in range(number):
        for cut in stage.receives:
            if cut.entry is not None:
                yield Action(name_of(cut.entry), cut.name, role=stage.role, microbatch=k)
        yield Action("forward", role=stage.role, microbatch=k)
        if number > 1:
            yield from _run_back(program, stage, k, last=k == number - 1)


def _backward(program: LoweredProgram, rank_program: RankProgram, role: str) -> Iterator[Action]:
    """Yield what a rank does while `role` goes backward and the gradients of its cuts are returned."""
    stage = program.stage(role)
    if role in rank_program.roles:
        gradients = [cut for cut in stage.sends if cut.gradient and cut.value not in stage.inputs]
        if program.num_microbatches(stage) == 1 and (stage.has_loss or gradients):
            yield from _run_back(program, stage, 0, last=True)
    for cut in reversed(stage.receives):
        if cut.gradient and cut.sent:
            if role in rank_program.roles:
                yield Action("send_grad", cut.name, cut.producer, role)
            if cut.producer in rank_program.roles:
                yield Action("recv_grad", cut.name, role, cut.producer)


def _run_back(program: LoweredProgram, stage: Stage, microbatch: int, last: bool) -> Iterator[Action]:
    """Yield a stage's backward, with what it begins and leaves to be done."""
    role, every = stage.role, program.plan.grouping(stage.role).updates == "every"
    trains = any(program.tensors[name].trainable for name in stage.tensors)
    returns = [cut for cut in stage.receives if cut.gradient]
    if not returns and not trains:
        return
    yield Action("backward", role=role, microbatch=microbatch)
    if any(node.target is comm_ops.late_multiply for node in stage.graph.nodes):
        yield Action("multiply", role=role, microbatch=microbatch)
    if last or every:
        for verb, buckets in (("all_reduce", stage.buckets), ("push", stage.served)):
            for bucket in range(len(buckets)):
                yield Action(verb, role=role, microbatch=microbatch, bucket=bucket)
    for cut in reversed(returns):
        if cut.entry is not None:
            yield Action(f"{name_of(cut.entry)}_grad", cut.name, role=role, microbatch=microbatch)
    if every and trains:
        yield Action("update", role=role, microbatch=microbatch)
