"""The rewriting passes together: their order, and lowering with and without checks."""

from __future__ import annotations

import pytest

from splitc.errors import InternalError
from splitc.ir.program import LoweredProgram
from splitc.passes import rewriting
from splitc.passes.rewriting import lower, lower_unchecked
from splitc.passes.schedule import Schedule
from tests.support.pair import placed_pair, printed_stage
from tests.support.printed import printed


def all_text(program: LoweredProgram) -> str:
    """Print the graph, the action lists, the stages and their buckets."""
    stages = [f"{printed_stage(program, each.role)}\n{each.buckets} {each.served}" for each in program.stages]
    return "\n\n".join([printed(program), *stages])


def test_lowering_without_checks_gives_the_same_program() -> None:
    for strategy in ["parameter_server", "modulo_shard(mp=2)", "late_multiply"]:
        program = placed_pair(2, strategy)
        assert all_text(lower_unchecked(program)) == all_text(lower(program)), strategy


def test_only_lower_checks_what_passes_ensure(monkeypatch: pytest.MonkeyPatch) -> None:
    program = placed_pair(2, "layer_separation")
    others = tuple(each for each in rewriting.ON_THE_STAGES if not isinstance(each, Schedule))
    monkeypatch.setattr(rewriting, "ON_THE_STAGES", (*others, Unscheduled()))
    assert all(not each.actions for each in lower_unchecked(program).rank_programs)
    with pytest.raises(InternalError, match="schedule broke the program"):
        lower(program)


class Unscheduled(Schedule):
    """A scheduling pass that forgets to schedule."""

    def run(self, program: LoweredProgram) -> LoweredProgram:
        return program
