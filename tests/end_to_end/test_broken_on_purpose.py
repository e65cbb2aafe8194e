"""A program broken on purpose is caught, by a checker or by verify, with a message that names the place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F

from splitc.compiled import CompiledProgram
from splitc.errors import InternalError
from splitc.ir.graph import tensor_spec, update_info
from splitc.ir.pass_manager import run_pass
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.schedule.actions import Action
from splitc.passes.insert_comm import InsertComm
from splitc.passes.schedule import Schedule
from splitc.passes.split_ranks import SplitRanks
from splitc.runtime.transport.base import Deadlock
from tests.support.capturing import capture
from tests.support.compiled import actions_of, with_actions, with_files
from tests.support.ranks import Net, batch_of, compile_net


def separated(n_c: int = 2, n_f: int = 2) -> CompiledProgram:
    return compile_net(Net(norm=False), f"layer_separation(n_c={n_c}, n_f={n_f})", n_c + n_f)


@pytest.mark.slow
def test_a_schedule_with_a_deadlock_does_not_leave_the_compiler() -> None:
    class Backwards(Schedule):
        def run(self, program):  # type: ignore[no-untyped-def]
            program = super().run(program)
            fc = actions_of(program, "fc")
            return with_actions(
                program, fc=[a for a in fc if a.verb == "sum_loss"] + [a for a in fc if a.verb != "sum_loss"]
            )

    with pytest.raises(InternalError, match=r"schedule broke the program(.|\n)*deadlock in a cycle"):
        run_pass(Backwards(), separated().program)


@pytest.mark.slow
def test_a_node_lost_in_the_split_is_named() -> None:
    class Forgetful(SplitRanks):
        def run(self, program):  # type: ignore[no-untyped-def]
            program = super().run(program)
            stage = program.stage("fc")
            node = next(n for n in stage.graph.nodes if n.name == "head_1")
            node.replace_all_uses_with(node.args[0])
            stage.graph.erase_node(node)
            return program

    with pytest.raises(InternalError, match=r"split-ranks broke the program(.|\n)*head_1"):
        run_pass(Forgetful(), separated().program)


@pytest.mark.slow
def test_a_cut_in_a_pass_that_forgets_its_sends_is_refused() -> None:
    class Silent(InsertComm):
        def run(self, program):  # type: ignore[no-untyped-def]
            program = super().run(program)
            for node in program.graph.nodes:
                if getattr(node.target, "__name__", "") == "recv":
                    node.replace_all_uses_with(node.args[0].args[0])
            return program

    whole, (x, y) = separated(2, 1).program, batch_of(4)
    fresh = capture(Net(norm=False), (x,), y, F.cross_entropy)
    with pytest.raises(InternalError, match=r"insert-comm broke the program(.|\n)*without send and recv"):
        run_pass(Silent(), replace(fresh, loss_terms=whole.loss_terms).placed(whole.plan))


def test_a_pass_that_makes_a_wrong_shape_does_not_leave_the_compiler() -> None:
    class Wider(SplitRanks):
        def run(self, program: PlacedProgram) -> LoweredProgram:
            lowered = super().run(program)
            node = next(n for n in lowered.stage("fc").graph.nodes if n.name == "head_1")
            update_info(node, spec=replace(tensor_spec(node), shape=(1, 17)))
            return lowered

    words = r"split-ranks broke the program(.|\n)*shapes_hold: .*head_1 is \(\d+, 16\) in role fc .*, not \(\d+, 17\)"
    with pytest.raises(InternalError, match=words):
        run_pass(Wider(), separated().program)


@pytest.mark.slow
def test_a_receive_that_is_missing_at_run_time_is_a_deadlock_or_left_over_message() -> None:
    program = with_files(
        separated(1, 1),
        conv=(
            'd_cut0 = comm.recv("fc", (-1, 36), torch.float32)',
            'd_cut0 = comm.recv("fc", (-1, 36), torch.float32)\n    comm.recv("fc", (-1, 1), torch.float32)',
        ),
    )
    with pytest.raises(Deadlock, match="rank 0"):
        program.verify()


def test_verify_notices_one_rank_with_wrong_examples() -> None:
    program = separated(2, 1)
    files = dict(program.files)
    files["rank1.py"] = files["rank1.py"].replace("examples=(4, 8)", "examples=(4, 7)")
    program.__dict__["files"] = files
    with pytest.raises(Exception, match="rank 1"):
        program.verify()


def test_an_unknown_action_is_a_bug_of_ours() -> None:
    with pytest.raises(InternalError, match="unknown action 'sned'"):
        Action("sned", "cut0")
