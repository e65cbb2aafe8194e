"""Checks of action lists: each rank program does all that its stages need, once, and in a valid order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from splitc.ir import comm_ops
from splitc.ir.actions import Action, RankProgram
from splitc.ir.dealt import fetches_ahead
from splitc.ir.graph import denominators
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, Stage
from splitc.ir.rounds import exchanges
from splitc.ir.transitions import name_of


@dataclass(frozen=True)
class Need:
    """An action that must occur once, after all of `after` and before all of `before` that occur."""

    action: Action
    after: tuple[Action, ...] = ()
    before: tuple[Action, ...] = ()


def actions_are_complete(program: LoweredProgram) -> list[str]:
    """Each action list has what its stages need, nothing twice and nothing else, in order."""
    return [problem for each in program.rank_programs for problem in _problems(program, each)]


def _problems(program: LoweredProgram, rank_program: RankProgram) -> Iterator[str]:
    counted = Counter(rank_program.actions)
    where = {action: k for k, action in enumerate(rank_program.actions)}
    needs = {need.action: need for need in _needs(program, rank_program)}
    for action, need in needs.items():
        if counted[action] != 1:
            yield f"{rank_program.name}: {action} is done {counted[action]} times, not once"
            continue
        for others, wrong in ((need.after, "before"), (need.before, "after")):
            for other in others:
                if other in where and (where[action] < where[other]) == (wrong == "before"):
                    yield f"{rank_program.name}: {action} comes {wrong} {other}"
    for action in counted:
        if action not in needs:
            yield f"{rank_program.name}: {action} is no part of its step"


def _needs(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Need]:
    roles = rank_program.roles
    loss = next((action for action in rank_program.actions if action.verb == "sum_loss"), None)
    yield Need(loss or Action("sum_loss", role=roles[-1]))
    if roles == (SERVER,):
        yield from (Need(Action("send_parameters", role=SERVER)), Need(Action("reduce_gradients", role=SERVER)))
    for role in roles:
        if role != SERVER:
            yield from _stage_needs(program, program.stage(role))
    for name, ranks in program.tied.items():
        if set(rank_program.ranks) <= set(ranks):
            backwards = tuple(action for action in rank_program.actions if action.verb == "backward")
            yield Need(Action("all_reduce_tied", name, role=roles[0]), after=backwards)


def _stage_needs(program: LoweredProgram, stage: Stage) -> Iterator[Need]:
    role, number = stage.role, program.num_microbatches(stage)
    every = program.plan.grouping(role).updates == "every"
    forwards = tuple(Action("forward", role=role, microbatch=k) for k in range(number))
    trains = any(program.tensors[name].trainable for name in stage.tensors)
    receives_gradients = any(cut.gradient and cut.value not in stage.inputs for cut in stage.sends)
    runs_back = (trains or any(cut.gradient for cut in stage.receives)) and (stage.has_loss or receives_gradients)
    backwards = tuple(Action("backward", role=role, microbatch=k) for k in range(number)) if runs_back else ()
    if stage.served:
        yield Need(Action("pull", role=role), before=forwards)
    if denominators(stage.graph):
        yield Need(Action("weigh", role=role), before=forwards)
    for cut in stage.receives:
        yield from _received(program, stage, cut, forwards, backwards)
    for cut in stage.sends:
        yield from _sent(program, stage, cut, forwards, backwards)
    late = any(node.target is comm_ops.late_multiply for node in stage.graph.nodes)
    for k, forward in enumerate(forwards):
        yield Need(forward)
        after = backwards[k : k + 1]
        if not after:
            continue
        yield Need(backwards[k], after=(forward,))
        if late:
            yield from [Need(Action("multiply", role=role, microbatch=k), after=after)] * (k == number - 1)
        if every and trains:
            yield Need(Action("update", role=role, microbatch=k), after=after)
    if stage.dealt:
        yield Need(Action("deal", role=role), before=forwards)
        yield Need(Action("collect", role=role), after=backwards)
    if fetches_ahead(stage):
        yield Need(Action("fetch_ahead", role=role), after=(Action("deal", role=role),), before=forwards)
    yield from (Need(action, after=backwards) for action in exchanges(program.plan.rounds, stage))
    for k in range(number) if every else (number - 1,):
        after = (*backwards[k : k + 1], Action("multiply", role=role, microbatch=k))  # while gradients travel
        for verb, buckets in (("all_reduce", stage.buckets), ("push", stage.served)):
            for bucket in range(len(buckets)):
                yield Need(Action(verb, role=role, microbatch=k, bucket=bucket), after=after)


def _received(
    program: LoweredProgram, stage: Stage, cut: Cut, forwards: tuple[Action, ...], backwards: tuple[Action, ...]
) -> Iterator[Need]:
    """Yield what the consumer of a cut needs to receive it, gather it, and return its gradient."""
    role, every = stage.role, program.plan.grouping(stage.role).updates == "every"
    modulos: list[Action] = []
    returned: list[Action] = []
    if cut.entry is not None:
        verb = name_of(cut.entry)
        modulos = [Action(verb, cut.name, role=role, microbatch=k) for k in range(len(forwards)) if cut.gathered]
        yield from (Need(modulo, before=(forward,)) for modulo, forward in zip(modulos, forwards, strict=False))
        if cut.gradient:
            returned = [Action(f"{verb}_grad", cut.name, role=role, microbatch=k) for k in range(len(backwards))]
        for k, action in enumerate(returned):
            before = (Action("update", role=role, microbatch=k),) if every else ()
            yield Need(action, after=(backwards[k],), before=before)
    if not cut.sent:
        return
    for k, own in _pieces(program, cut):
        yield Need(Action("recv", cut.name, cut.producer, role, k), before=(*modulos[own], *forwards[own]))
        if cut.gradient:
            after = (*backwards[own], *returned[own])
            yield Need(Action("send_grad", cut.name, cut.producer, role, k), after=after)


def _sent(
    program: LoweredProgram, stage: Stage, cut: Cut, forwards: tuple[Action, ...], backwards: tuple[Action, ...]
) -> Iterator[Need]:
    """Yield what the producer of a cut needs to send it, and receive its gradient."""
    role, is_input = stage.role, cut.value in stage.inputs
    for k, own in _pieces(program, cut) if cut.sent else ():
        yield Need(Action("send", cut.name, cut.consumer, role, k), after=() if is_input else forwards[own])
        if cut.gradient and not is_input:
            yield Need(Action("recv_grad", cut.name, cut.consumer, role, k), before=backwards[own])


def _pieces(program: LoweredProgram, cut: Cut) -> list[tuple[int, slice]]:
    """The microbatches in which a cut travels, and of each those of its role: inputs travel whole."""
    if program.travels_whole(cut):
        return [(0, slice(None))]
    return [(k, slice(k, k + 1)) for k in range(program.plan.microbatches)]
