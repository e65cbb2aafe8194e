"""The functions that begin and end a round, and exchange fragments between its updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from splitc.codegen.features import Feature, Writer
from splitc.codegen.layout import Line, block
from splitc.codegen.stage_names import bucket_table, buckets_text, constant
from splitc.ir.program import LoweredProgram, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.schedule.verb import When
from splitc.runtime.spec import RankSpec, RoleSpec, Rounds


class InRounds(Feature):
    """What units exchange."""

    notes: ClassVar = {
        "unit": "ranks that train together between averages",
        "averaged": "ranks of all units that average the same parameters",
        "rounds": "of local updates",
    }

    def of_role(self, program: LoweredProgram, rank: int, role: RoleSpec) -> RoleSpec:
        plan = program.plan
        if plan.rounds is None:
            return role
        averaged, through_server = plan.averaged(role.role, rank), plan.rounds.through == "server"
        return replace(role, unit=plan.unit(rank), averaged=averaged, through_server=through_server)

    def of_rank(self, program: LoweredProgram, spec: RankSpec) -> RankSpec:
        return replace(spec, rounds=program.plan.rounds)

    def functions(self, spec: RankSpec) -> tuple[str, ...]:
        if spec.rounds is None:
            return ()
        return (*(("after_update",) if spec.rounds.in_turns else ()), "begin_round", "end_round")

    def tables(self, program: LoweredProgram, rank_program: RankProgram, stage: Stage) -> Iterator[list[str]]:
        if stage.averaged:
            head = f"{constant('AVERAGED', rank_program, stage)} = (  # averaged together over the units in a round"
            yield bucket_table(program, stage, stage.averaged, head)

    def further(self, writer: Writer) -> Iterator[list[str]]:
        if (rounds := writer.program.plan.rounds) is None:
            return
        actions, bodies = writer.rank_program.actions, dict[When, list[Line]]()
        for when in (When.BEFORE_ROUND, When.AFTER_ROUND):
            bodies[when] = [line for each in actions if each.row.when is when for line in writer.lines(each)]
        yield writer.function_of("begin_round", [], "Before the first step of a round.", bodies[When.BEFORE_ROUND])
        if rounds.in_turns:
            yield _after_update(writer, rounds)
        yield writer.function_of("end_round", [], "At the end of a round, and of training.", bodies[When.AFTER_ROUND])

    def lines(self, writer: Writer, action: Action, comm: str) -> list[Line] | None:
        if action.verb not in ("keep", "average"):
            return None
        return _exchange(writer, action, comm)


FEATURE = InRounds()


def _after_update(writer: Writer, rounds: Rounds) -> list[str]:
    """The function of fragments that take turns."""
    actions, body = writer.rank_program.actions, list[Line]()
    for update in sorted({action.update for action in actions if action.update}):
        own = [action for action in actions if action.update == update]
        inner = (line for each in own for line in _exchange(writer, each, writer.comm(each.role), not rounds.delay))
        body += block(f"if update == {update}:", inner)
    travels = f"; it arrives {rounds.delay} update{'s' * (rounds.delay > 1)} later" if rounds.delay else ""
    doc = f"After an update, from 1 to {rounds.steps}, of a round: a fragment has its turn{travels}."
    return writer.function_of("after_update", ["update"], doc, body)


def _exchange(writer: Writer, action: Action, comm: str, waits: bool = True) -> list[Line]:
    """What a role keeps or averages in a round: a line for all buckets of a fragment.  waits: at once."""
    program, stage = writer.program, writer.program.stage(action.role)
    rounds, name, bucket = program.plan.rounds, constant("AVERAGED", writer.rank_program, stage), action.bucket or 0
    assert rounds is not None, action
    if action.verb == "keep":
        options = f"lr={rounds.outer_lr}, momentum={rounds.outer_momentum}, nesterov={rounds.nesterov}"
        options += f", fragments={stage.fragments}" * (rounds.patience is not None)
        return [(f"{comm}.keep(stage, {name}, {options})", "SGD of the averaged change")]
    fragment = stage.fragments[bucket]
    first = stage.fragments.index(fragment)
    end = first + stage.fragments.count(fragment)
    if bucket != first:
        return []
    if action.verb == "arrive":
        mixed = "" if rounds.mixing is None else f"mixed with {rounds.mixing:g} of its own"
        return [(f"{comm}.arrive({fragment})", mixed or "plus what this rank trained meanwhile")]
    given = f"{name}[{first}:{end}], {fragment}" if rounds.fragments > 1 else name
    note = f"{buckets_text(program, stage, stage.averaged[first:end])}, over all units"
    note += ", through the first one" if rounds.through == "server" else ""
    if program.plan.deals:
        note, given = f"{note}, with the optimizer's state", f"{given}, optimizer=True"
    if waits:
        return [(f"{comm}.average(stage, {given})", note)]
    given += f", mixing={rounds.mixing}" * (rounds.mixing is not None)
    return [(f"{comm}.start_average(stage, {given})", note)]
