"""Checks of action lists: each rank program does all that its stages need, once, and in a valid order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from splitc.ir.comm_ops import finishes
from splitc.ir.features import features
from splitc.ir.graph import denominators
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.transitions import name_of


def actions_are_complete(program: LoweredProgram) -> list[str]:
    """Each action list has what its stages need, nothing twice and nothing else, in order."""
    return [problem for each in program.rank_programs for problem in _problems(program, each)]


def _problems(program: LoweredProgram, rank_program: RankProgram) -> Iterator[str]:
    counted = Counter(rank_program.actions)
    where = {action: k for k, action in enumerate(rank_program.actions)}
    of_verb: dict[str, list[Action]] = defaultdict(list)
    for action in where:
        of_verb[action.verb].append(action)
    needs = dict.fromkeys(_needs(program, rank_program))
    for action in needs:
        if counted[action] != 1:
            yield f"{rank_program.name}: {action} is done {counted[action]} times, not once"
            continue
        for verbs, wrong in ((action.row.after, "before"), (action.row.before, "after")):
            for other in (other for verb in verbs for other in of_verb[verb]):
                if (where[action] < where[other]) == (wrong == "before") and _concerns(program, action, other):
                    yield f"{rank_program.name}: {action} comes {wrong} {other}"
    for action in counted:
        if action not in needs:
            yield f"{rank_program.name}: {action} is no part of its step"


def _concerns(program: LoweredProgram, action: Action, other: Action) -> bool:
    """Whether the order of two verbs holds for these actions: of one role, microbatch and cut; inputs need nothing."""
    if action.row.anywhere:
        return True
    if action.role != other.role:
        return False
    if action.verb == "send" and action.value in _inputs(program, action.role):
        return False
    if action.row.moves_cut and other.row.moves_cut and action.value != other.value:
        return False
    each = program.repeats(action) and program.repeats(other)
    return not each or action.microbatch == other.microbatch


def _needs(program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
    """Yield all that a rank program does in a step."""
    roles = rank_program.roles
    yield next((a for a in rank_program.actions if a.verb == "sum_loss"), Action("sum_loss", role=roles[-1]))
    for feature in features():
        yield from (*feature.begins(program, rank_program), *feature.ends(program, rank_program))
    for stage in program.stages_of(rank_program):
        yield from _stage_needs(program, stage)
    for name, ranks in program.tied.items():
        if set(rank_program.ranks) <= set(ranks):
            yield Action("all_reduce_tied", name, role=roles[0])


def _stage_needs(program: LoweredProgram, stage: Stage) -> Iterator[Action]:
    role, number = stage.role, program.turns(stage)
    every = program.plan.grouping(role).updates == "every"
    trains = any(program.tensors[name].trainable for name in stage.tensors)
    receives_gradients = any(cut.gradient and cut.value not in stage.inputs for cut in stage.sends)
    runs_back = (trains or any(cut.gradient for cut in stage.receives)) and (stage.has_loss or receives_gradients)
    if denominators(stage.graph):
        yield Action("weigh", role=role)
    finished = finishes(stage.graph)
    for k in range(number):
        last = k == number - 1
        each = {"forward": True, "backward": runs_back, "update": runs_back and every and trains}
        each |= dict.fromkeys(finished, runs_back and last)
        yield from (Action(verb, role=role, microbatch=k) for verb, needed in each.items() if needed)
        for cut in stage.receives:
            if cut.entry is not None and cut.gathered:
                yield Action(name_of(cut.entry), cut.name, role=role, microbatch=k)
            if cut.entry is not None and cut.gradient and runs_back:
                yield Action(f"{name_of(cut.entry)}_grad", cut.name, role=role, microbatch=k)
        yield from stage.sums(k) if every or last else ()
    yield from _crossing(program, stage)


def _crossing(program: LoweredProgram, stage: Stage) -> Iterator[Action]:
    """Yield what sends and receives the cuts of a stage, and their gradients."""
    for cut in (*stage.receives, *stage.sends):
        consumes = cut in stage.receives
        verbs = ("recv", "send_grad") if consumes else ("send", "recv_grad")
        is_input = not consumes and cut.value in stage.inputs
        for verb in verbs[: 1 + (cut.gradient and not is_input)] if cut.sent else ():
            for k in range(1 if program.travels_whole(cut) else program.plan.microbatches):
                yield Action(verb, cut.name, cut.other(stage.role), stage.role, k)


def _inputs(program: LoweredProgram, role: str) -> set[str]:
    """The names of the cuts that are inputs which a role passes on."""
    stage = program.stage(role)
    return {cut.name for cut in stage.sends if cut.value in stage.inputs}
