"""A program broken on purpose is caught, by a checker or by verify, with a message that names the place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.nn.functional as F
from torch import nn

from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.checks.graph import buckets_hold_every_gradient, cuts_are_communicated, shapes_hold, stages_cover_the_graph
from splitc.compiled import CompiledProgram
from splitc.errors import InternalError
from splitc.ir.graph import cut_of, tensor_spec, update_info
from splitc.ir.pass_manager import run_pass
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.schedule.actions import Action
from splitc.passes.insert_comm import InsertComm
from splitc.passes.schedule import Schedule
from splitc.passes.split_ranks import SplitRanks
from splitc.runtime.transport.base import Deadlock
from tests.support.capturing import capture
from tests.support.compiled import actions_of, class_batch, compiled, with_actions, with_files


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.head(self.features(x).flatten(1))


def separated(n_c: int = 2, n_f: int = 2, loss: object = F.cross_entropy) -> CompiledProgram:
    x, y = class_batch((4, 1, 8, 8))
    pins = {"features.*": "conv", "head.*": "fc"}
    return compiled(Net(), (x,), y, loss, n_c + n_f, f"layer_separation(n_c={n_c}, n_f={n_f})", pins=pins)


def test_the_unbroken_program_passes_every_check() -> None:
    program = separated()
    for check in (sends_meet_receives, no_deadlock, shapes_hold, stages_cover_the_graph, buckets_hold_every_gradient):
        assert check(program.program) == []
    assert program.verify().holds


def test_a_dropped_receive_is_named_with_its_ranks() -> None:
    program = separated().program
    fc = [a for a in actions_of(program, "fc") if (a.verb, a.value) != ("recv", "cut0")]
    problems = sends_meet_receives(with_actions(program, fc=fc))
    assert "rank 0 sends cut0.conv.fc[0:4], which rank 2 never receives" in problems


def test_swapped_sends_are_named_with_what_the_other_side_expects() -> None:
    program = separated().program
    conv = actions_of(program, "conv")
    first, second = (k for k, a in enumerate(conv) if a.verb == "send")
    conv[first], conv[second] = conv[second], conv[first]
    problems = sends_meet_receives(with_actions(program, conv=conv))
    assert any("rank 0 sends cut0.conv.fc[0:4]" in p and "rank 2 receives target.conv.fc[0:4]" in p for p in problems)


def test_a_circle_of_waiting_ranks_is_printed() -> None:
    program = separated().program
    conv = actions_of(program, "conv")
    conv.insert(0, conv.pop(next(k for k, a in enumerate(conv) if a.verb == "sum_loss")))
    assert sends_meet_receives(with_actions(program, conv=conv)) == []
    (problem,) = no_deadlock(with_actions(program, conv=conv))
    assert (
        "deadlock in a cycle" in problem and "collective loss" in problem and "cut0" in problem
    ) or "target" in problem


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


def test_a_value_read_across_roles_without_send_is_named() -> None:
    program = separated().program
    graph = program.graph
    got = next(n for n in graph.nodes if getattr(n.target, "__name__", "") == "recv" and cut_of(n).name == "cut0")
    got.replace_all_uses_with(got.args[0].args[0])
    (problem,) = cuts_are_communicated(program)
    assert "flatten of role conv is read by head_0 of role fc" in problem


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


def test_a_cut_in_a_pass_that_forgets_its_sends_is_refused() -> None:
    class Silent(InsertComm):
        def run(self, program):  # type: ignore[no-untyped-def]
            program = super().run(program)
            for node in program.graph.nodes:
                if getattr(node.target, "__name__", "") == "recv":
                    node.replace_all_uses_with(node.args[0].args[0])
            return program

    x, y = class_batch((4, 1, 8, 8))
    whole = compiled(Net(), (x,), y, F.cross_entropy, 3, "layer_separation").program
    fresh = capture(Net(), (x,), y, F.cross_entropy)
    with pytest.raises(InternalError, match=r"insert-comm broke the program(.|\n)*without send and recv"):
        run_pass(Silent(), replace(fresh, loss_terms=whole.loss_terms).placed(whole.plan))


def test_a_gradient_that_is_not_summed_is_named_by_the_checker() -> None:
    program = separated().program
    stage = program.stage("conv")
    short = replace(stage, buckets=(stage.buckets[0][:-1],))
    problems = buckets_hold_every_gradient(replace(program, stages=(short, program.stage("fc"))))
    assert problems == [
        f"the gradient of {stage.buckets[0][-1]} in role conv is summed not at all, not once by all_reduce"
    ]


def test_a_receive_of_the_wrong_shape_is_named() -> None:
    program = separated().program
    got = next(n for n in program.stage("fc").graph.nodes if n.name == "cut0")
    update_info(got, spec=replace(tensor_spec(got), shape=(1, 35)))
    assert any("head_0" in p and "role fc" in p for p in shapes_hold(program))


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


def test_verify_names_the_loss_when_it_is_not_scaled() -> None:
    program = with_files(
        separated(), fc=("cross_entropy / cross_entropy_weight.wait()", "cross_entropy / target.shape[0]")
    )
    result = program.verify()
    assert not result.holds and result.loss_error > 0.5
    assert "cross_entropy" in result.where and "2 times" in result.where


def test_verify_names_a_mean_that_is_not_shared_out() -> None:
    def loss(out, target):  # type: ignore[no-untyped-def]
        return F.mse_loss(out, F.one_hot(target, 10).float())

    program = with_files(separated(loss=loss), fc=("comm.scale_by_share(", "("))
    result = program.verify()
    assert not result.holds and "mse_loss" in result.where


def test_verify_names_the_layer_whose_gradients_are_not_summed() -> None:
    program = with_files(separated(), conv=("    with comm.all_reduce(stage, BUCKETS):", "    if True:"))
    result = program.verify()
    assert (not result.holds and result.loss_error <= result.tolerance) or result.gradient_error > 0.01
    assert result.where.startswith("layer features.0")


def test_verify_names_the_layer_below_a_mis_scaled_gradient() -> None:
    program = with_files(separated(), conv=("(d_cut0)", "(d_cut0 * 0.5)"))
    result = program.verify(steps=1)
    assert not result.holds
    assert result.where.startswith("layer features.0") and "0.5 times" in result.where


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
