"""Write the action list of each rank program's step.

This pass rewrites: it fills `RankProgram.actions`.  One batch goes forward through the roles in the order of the plan
and back; a rank in several roles does for each what a rank of that role alone does, in that order:

    conv   send target -> fc, forward, send cut0 -> fc, sum_loss, recv_grad cut0 <- fc, backward, all_reduce bucket0
    fc     recv target <- conv, recv cut0 <- conv, forward, sum_loss, backward, all_reduce bucket0,
           send_grad cut0 -> conv

Inputs are sent before the role computes, so that they travel meanwhile.  An `all_reduce` after `backward` begins when
backward has filled the bucket, and ends there; late-multiplied layers `multiply` meanwhile.

In microbatches the order is that of `grid`.  Inputs travel whole, before the first one; all other values travel and
return by microbatch.  A receive is posted before the rank computes what stands before it, so that values travel
meanwhile.  Gradients add up and are summed in the last microbatch.  The role of the loss may have microbatches of its
groups alone (SplitBrain 3.1); what the others do once is then done before and after them:

    fc     modulo cut0 [k], modulo target [k], forward [k], backward [k], modulo_grad cut0 [k]    for each microbatch k
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from splitc.checks.actions import actions_are_complete
from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.checks.graph import stages_cover_the_graph
from splitc.ir.comm_ops import finishes
from splitc.ir.features import features
from splitc.ir.graph import denominators
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import Cut, LoweredProgram, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.transitions import name_of
from splitc.ir.wire import of_action
from splitc.passes.grid import grid


@dataclass(frozen=True)
class Schedule(Pass[LoweredProgram, LoweredProgram]):
    """Schedule one batch at a time, whole or in microbatches."""

    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (actions_are_complete, sends_meet_receives, no_deadlock)

    def run(self, program: LoweredProgram) -> LoweredProgram:
        scheduled = (
            replace(each, actions=tuple(_actions(program, each)), whole=tuple(_evaluation(program, each)))
            for each in program.rank_programs
        )
        return replace(program, rank_programs=tuple(scheduled))


@dataclass(frozen=True)
class ScheduleForward(Pass[LoweredProgram, LoweredProgram]):
    """Schedule the forward of one batch alone, for what the model returns and for an evaluation of its own."""

    requires: ClassVar[tuple[Check, ...]] = (stages_cover_the_graph,)
    ensures: ClassVar[tuple[Check, ...]] = (sends_meet_receives, no_deadlock)

    def run(self, program: LoweredProgram) -> LoweredProgram:
        found = {each: tuple(_evaluation(program, each)) for each in program.rank_programs}
        scheduled = (replace(each, actions=actions, whole=actions) for each, actions in found.items())
        return replace(program, rank_programs=tuple(scheduled))


def _evaluation(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
    """Yield what ranks do forward, with one batch as a whole."""
    begins = (action for feature in features() for action in feature.begins(program, rank_program))
    yield from (action for action in begins if action.row.forward)
    for stage in (program.stage(role) for role in program.plan.roles):
        yield from _forward(program, rank_program, stage, 0, early=False)
        if stage.has_loss:
            yield _sum_loss(program, rank_program)


def _actions(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
    for feature in features():
        yield from feature.begins(program, rank_program)
    yield from _posted_early(program, rank_program.ranks[0], list(_cells(program, rank_program)))
    for name, ranks in program.tied.items():
        if set(rank_program.ranks) <= set(ranks):
            yield Action("all_reduce_tied", name, role=rank_program.roles[0])
    for feature in features():
        yield from feature.ends(program, rank_program)


def _cells(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
    """Yield the cells of the grid; the loss is summed after the last of its role, or before it goes back once."""
    plan, names = program.plan, list(program.plan.roles)
    programs = [[names.index(role) for role in each.roles if role in names] for each in program.rank_programs]
    numbers = [program.turns(program.stage(role)) for role in names]
    order = plan.schedule if plan.in_pieces else "all_forward"
    for cell in grid(programs, numbers, order, [len(parts) for parts in plan.parts.values()]):
        stage = program.stage(names[cell.role])
        yield from (_forward if cell.forward else _backward)(program, rank_program, stage, cell.microbatch)
        if stage.has_loss and cell.microbatch == numbers[cell.role] - 1 and cell.forward == (numbers[cell.role] == 1):
            yield _sum_loss(program, rank_program)


def _sum_loss(program: LoweredProgram, rank_program: RankProgram) -> Action:
    """The sum of the loss, in the role that computes it if these ranks are in it."""
    own = (stage.role for stage in program.stages_of(rank_program) if stage.has_loss)
    return Action("sum_loss", role=next(own, rank_program.roles[-1]))


def _forward(
    program: LoweredProgram, rank_program: RankProgram, stage: Stage, k: int, early: bool = True
) -> Iterator[Action]:
    """Yield what a rank does while a role goes forward: as one of it, and as one of the roles that it sends to.

    early: groups may begin to take what the stage made, to compute on another microbatch meanwhile.
    Every rank receives a value at the same point of its list, whatever else it does, so no two wait for each other.
    """
    if k == 0:
        yield from _cross(rank_program, (cut for cut in stage.sends if cut.value in stage.inputs), 0)
    if stage.role in rank_program.roles:
        if k == 0 and denominators(stage.graph):
            yield Action("weigh", role=stage.role)
        for cut in stage.receives:
            if cut.gathered and not (early and program.enters_early(cut)):
                yield _entry(cut, k)
        yield Action("forward", role=stage.role, microbatch=k)
        yield from (_entry(cut, k) for cut in stage.sends if early and program.enters_early(cut))
    yield from _cross(rank_program, (cut for cut in stage.sends if cut.value not in stage.inputs), k)


def _entry(cut: Cut, k: int) -> Action:
    """The transition with which a group takes a cut."""
    assert cut.entry is not None
    return Action(name_of(cut.entry), cut.name, role=cut.consumer, microbatch=k)


def _cross(rank_program: RankProgram, cuts: Iterable[Cut], k: int) -> Iterator[Action]:
    """Bring cuts to their consumer's role; its groups gather them when they compute."""
    for cut in cuts:
        produces, consumes = (role in rank_program.roles for role in (cut.producer, cut.consumer))
        if cut.sent and produces:
            yield Action("send", cut.name, cut.consumer, cut.producer, k)
        if cut.sent and consumes:
            yield Action("recv", cut.name, cut.producer, cut.consumer, k)


def _backward(program: LoweredProgram, rank_program: RankProgram, stage: Stage, k: int) -> Iterator[Action]:
    """Yield what a rank does while a role goes backward and the gradients of its cuts are returned."""
    last = k == program.turns(stage) - 1
    gradients = [cut for cut in stage.sends if cut.gradient and cut.value not in stage.inputs]
    if stage.role in rank_program.roles and (stage.has_loss or gradients):
        yield from _run_back(program, stage, k, last)
    if not program.plan.in_pieces and not last:
        return  # the producer runs once
    for cut in reversed(stage.receives):
        if cut.gradient and cut.sent:
            number = k if program.plan.in_pieces else 0
            if stage.role in rank_program.roles:
                yield Action("send_grad", cut.name, cut.producer, stage.role, number)
            if cut.producer in rank_program.roles:
                yield Action("recv_grad", cut.name, stage.role, cut.producer, number)


def _run_back(program: LoweredProgram, stage: Stage, microbatch: int, last: bool) -> Iterator[Action]:
    """Yield a stage's backward, with what it begins and leaves to be done."""
    role, every = stage.role, program.plan.grouping(stage.role).updates == "every"
    trains = any(program.tensors[name].trainable for name in stage.tensors)
    returns = [cut for cut in stage.receives if cut.gradient]
    if not returns and not trains:
        return
    yield Action("backward", role=role, microbatch=microbatch)
    if last:
        yield from (Action(verb, role=role, microbatch=microbatch) for verb in finishes(stage.graph))
    if last or every:
        yield from stage.sums(microbatch)
    for cut in reversed(returns):
        if cut.entry is not None:
            yield Action(f"{name_of(cut.entry)}_grad", cut.name, role=role, microbatch=microbatch)
    if every and trains:
        yield Action("update", role=role, microbatch=microbatch)


def _posted_early(program: LoweredProgram, rank: int, actions: list[Action]) -> list[Action]:
    """In microbatches, move each receive before what a rank computes alone: the order on the wire stays as it is."""
    moved: list[Action] = []
    for action in actions:
        place = len(moved) if action.verb == "recv" and program.plan.in_pieces else 0
        while place and moved[place - 1].verb in ("forward", "backward"):
            if any(of_action(program, rank, moved[place - 1])):
                break
            place -= 1
        moved.insert(place, action) if place else moved.append(action)
    return moved
