"""Checks of action lists: every part does all that its stages need, once, and in an order that makes sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from splitc.ir import comm_ops
from splitc.ir.actions import Action
from splitc.ir.plan import SERVER
from splitc.ir.program import LoweredProgram, RankProgram, Stage
from splitc.ir.tied import tied


@dataclass(frozen=True)
class Need:
    """An action that must be there once, with those that must come before it and after it, where they are there."""

    action: Action
    after: tuple[Action, ...] = ()
    before: tuple[Action, ...] = ()


def actions_are_complete(program: LoweredProgram) -> list[str]:
    """Each part's list has what its stages need, nothing twice and nothing else, in order."""
    return [problem for part in program.rank_programs for problem in _problems(program, part)]


def _problems(program: LoweredProgram, part: RankProgram) -> Iterator[str]:
    counted, where = Counter(part.actions), {action: k for k, action in enumerate(part.actions)}
    needs = {need.action: need for need in _needs(program, part)}
    for action, need in needs.items():
        if counted[action] != 1:
            yield f"part {part.name}: {action} is done {counted[action]} times, not once"
            continue
        for others, wrong in ((need.after, "before"), (need.before, "after")):
            for other in others:
                if other in where and (where[action] < where[other]) == (wrong == "before"):
                    yield f"part {part.name}: {action} comes {wrong} {other}"
    for action in counted:
        if action not in needs:
            yield f"part {part.name}: {action} is no part of its step"


def _needs(program: LoweredProgram, part: RankProgram) -> Iterator[Need]:
    stages = [program.stage(role) for role in part.roles if role != SERVER]
    loss = next((action for action in part.actions if action.verb == "sum_loss"), None)
    yield Need(loss or Action("sum_loss", own=part.roles[-1]))
    if part.roles == (SERVER,):
        yield from (Need(Action("send_parameters", own=SERVER)), Need(Action("reduce_gradients", own=SERVER)))
    for stage in stages:
        yield from _stage(program, stage)
    for k, ranks in enumerate(tied(program).values()):
        if set(part.ranks) <= set(ranks):
            backwards = tuple(action for action in part.actions if action.verb == "backward")
            yield Need(Action("all_reduce_tied", f"tied{k}", own=part.roles[0]), after=backwards)


def _stage(program: LoweredProgram, stage: Stage) -> Iterator[Need]:
    own, grouping = stage.role, program.plan.groups.get(stage.role)
    number = program.num_microbatches(stage)
    every = grouping is not None and grouping.updates == "every"
    forwards = tuple(Action("forward", own=own, turn=turn) for turn in range(number))
    outputs = [cut for cut in stage.sends if cut.value not in stage.inputs]
    arrives = [cut for cut in outputs if cut.gradient]
    returns = [cut for cut in stage.receives if cut.gradient]
    trains = any(program.tensors[h].trainable for h in stage.tensors)
    goes_back = (trains or returns) and (stage.has_loss or arrives)
    backwards = tuple(Action("backward", own=own, turn=turn) for turn in range(number)) if goes_back else ()
    if stage.served:
        yield Need(Action("pull", own=own), before=forwards)
    for cut in stage.receives:
        if not cut.local:
            modulos = tuple(Action("modulo", cut.name, own=own, turn=turn) for turn in range(number))
            yield Need(Action("recv", cut.name, cut.producer, own), before=(*modulos, *forwards))
    for cut in stage.sends:
        kept = Action("slice_batch", cut.name, own=own)
        after = forwards if cut in outputs else ()
        if cut.leaves:
            yield Need(kept, after=after)
        if not cut.local:
            yield Need(Action("send", cut.name, cut.consumer, own), after=(*after, kept))
    for turn in range(number):
        yield from _turn(stage, forwards[turn], backwards[turn] if goes_back else None, every)
    for cut in arrives:
        spread = Action("all_gather_grad", cut.name, own=own)
        if not cut.local:
            yield Need(Action("recv_grad", cut.name, cut.consumer, own), before=(spread, *backwards))
        if cut.leaves:
            yield Need(spread, before=backwards)
    for cut in returns:
        if not cut.local:
            given = tuple(Action("modulo_grad", cut.name, own=own, turn=turn) for turn in range(number))
            yield Need(Action("send_grad", cut.name, cut.producer, own), after=(*backwards, *given))
    for turn in range(number) if every else (number - 1,):
        for verb, buckets in (("all_reduce", stage.buckets), ("push", stage.served)):
            for k in range(len(buckets)):
                yield Need(Action(verb, f"bucket{k}", own=own, turn=turn), after=backwards[turn : turn + 1])
        if every and trains and goes_back:
            yield Need(Action("update", own=own, turn=turn), after=backwards[turn : turn + 1])


def _turn(stage: Stage, forward: Action, backward: Action | None, every: bool) -> Iterator[Need]:
    own, turn = stage.role, forward.turn
    yield Need(forward)
    for cut in stage.receives:
        if cut.enters:
            yield Need(Action("modulo", cut.name, own=own, turn=turn), before=(forward,))
    if backward is None:
        return
    yield Need(backward, after=(forward,))
    if any(node.target is comm_ops.late_multiply for node in stage.graph.nodes):
        yield Need(Action("multiply", own=own, turn=turn), after=(backward,))
    for cut in stage.receives:
        if cut.enters and cut.gradient:
            before = (Action("update", own=own, turn=turn),) if every else ()
            yield Need(Action("modulo_grad", cut.name, own=own, turn=turn), after=(backward,), before=before)
