"""Each node and action of every strategy is needed: without it a check, the ranks or verify say where it is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.checks import deadlock
from splitc.checks.actions import actions_are_complete
from splitc.checks.deadlock import no_deadlock, sends_meet_receives
from splitc.compiled import CompiledProgram
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram
from splitc.ir.schedule.actions import Action
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.passes.schedule import Schedule
from splitc.runtime.transport.base import Mismatch
from tests.support.compiled import compiled
from tests.support.every_strategy import Asked, images, planned
from tests.support.sampling import sampled


def columns(size: int) -> Placement:
    return Placement(holding="sharded", group=size, split="columns")


def sharded(world: int = 2, scheme: str = "BK") -> CompiledProgram:
    """Groups of 2 ranks, all linear layers by columns."""
    return planned(world, f"modulo_shard(mp=2,scheme={scheme})", pins={"fc*": columns(2)})


def rows() -> CompiledProgram:
    pins = {
        "fc6": columns(2),
        "fc7": Placement(holding="sharded", group=2, split="rows"),
        "fc8": Placement(holding="replicated"),
    }
    return planned(2, "modulo_shard(mp=2,scheme=BK)", pins=pins)


def mixed() -> CompiledProgram:
    """A divided layer, a late-multiplied one and one on a single rank."""
    return planned(2, Asked("", "mixed", {"fc6": columns(2), "fc7": Placement(sync="late_multiply"), "fc8": "fc"}))


def late() -> CompiledProgram:
    return planned(2, Asked("", "late_multiply", {"fc*": Placement(sync="late_multiply")}))


def hybrid(world: int = 2) -> CompiledProgram:
    return planned(world, "hybrid_single", pins={"conv": "conv", "fc*": "fc"})


class Normed(nn.Module):
    """A norm that every rank of a group computes whole, before a layer that they divide."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.LayerNorm(27)
        self.fc = nn.Linear(27, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.norm(F.max_pool2d(F.relu(self.conv(x)), 2).flatten(1)))
        return scores


def entered() -> CompiledProgram:
    x, y = images(4)
    pins = {"norm": Placement(group=2), "fc": columns(2)}
    return compiled(Normed(), (x,), y, F.cross_entropy, 2, "mixed", pins=pins)


def edited(program: CompiledProgram, pattern: str, new: str) -> CompiledProgram:
    """The program with a pattern replaced in all of its generated files."""
    assert any(re.search(pattern, text) for text in program.files.values()), f"{pattern} is in no file"
    program.__dict__["files"] = {name: re.sub(pattern, new, text) for name, text in program.files.items()}
    return program


@pytest.mark.slow
def test_the_unbroken_programs_hold() -> None:
    for make in (sharded, rows, mixed, late, hybrid, entered):
        assert make().verify(steps=1).holds


# -- wrong numbers: verify names the layer -----------------------------------------------------------------------------

Case = tuple[Callable[[], CompiledProgram], str, str, str]
GATHERED = r"d_cut0 = fc\.reduce_scatter\(cut0_group\.grad, to=\"batch\"\)"
OWN = r"comm\.all_to_all\((\w+), to=\"batch\", features=14\)"
NAMED: dict[str, Case] = {
    "a gradient of the loss that is summed though all ranks have it": (
        sharded, "features=5, partial=False", "features=5, partial=True", r"layer fc8.*2 times"),
    "parts of a gradient that are taken for the whole": (
        sharded, r"features=14\)", "features=14, partial=False)", "layer fc6"),
    "gathered examples whose gradients are not summed": (
        sharded, GATHERED, "d_cut0 = fc.slice_batch(cut0_group.grad)", "layer conv"),
    "gathered examples whose gradients are not given back": (
        sharded, GATHERED, "d_cut0 = cut0_group.grad[: len(cut0)]", "layer conv"),
    "parts of a sum that are not summed": (
        rows, r"comm\.reduce_from_group\((comm\.linear\(.*?\.weight\))\)", r"\1", "the loss cross_entropy"),
    "the gradient of a norm that nobody sums": (
        entered, r"comm\.copy_to_group\((self\.norm\(cut0\))\)", r"\1", "layer norm"),
    "examples of others that are kept": (
        mixed, OWN, r"comm.shard(\1, features=14)[:4]", "the loss cross_entropy"),
    "a gradient that all ranks have, summed": (
        mixed, OWN, r"comm.slice_batch(comm.shard(\1, features=14))", "layer fc6.*2 times"),
    "a layer whose gradient nobody gathers": (late, r"comm\.late_multiply\(flatten", "F.linear(flatten", "layer fc6"),
    "a gradient divided by the number of ranks": (
        hybrid, r"(recv\(\"fc\", \(-1, 27\), torch\.float32\))", r"\1 / 2", r"layer conv.*0\.5 times"),
    "a turn that is left out of the loss": (
        lambda: sharded(scheme="B/K"), r"sum\(losses\)", "losses[-1]", "the loss cross_entropy"),
    "gradients of divided layers that groups do not sum": (
        lambda: sharded(4), r"with fc\.all_reduce\(stage, FC_BUCKETS\):", "if True:", "layer fc8"),
    "gradients of convolutions that ranks do not sum": (
        lambda: sharded(4), r"with conv\.all_reduce\(stage, CONV_BUCKETS\):", "if True:", "layer conv"),
    "a mean over the group's examples only": (
        lambda: sharded(4), r"cross_entropy_weight\.wait\(\)", "target.shape[0]", "the loss cross_entropy.*2 times"),
}  # fmt: skip


@sampled("name", NAMED, one_in=3, whole=True)
def test_verify_names_where_a_wrong_number_begins(name: str) -> None:
    make, pattern, new, where = NAMED[name]
    result = edited(make(), pattern, new).verify(steps=1)
    assert not result.holds
    assert re.search(where, result.where), result.where


@pytest.mark.slow
def test_the_share_of_a_mean_counts_every_turn_of_a_group() -> None:
    x, y = images(4)
    target = F.one_hot(y, 5).float()
    model, pins = nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 5)), {"3": columns(2)}
    program = compiled(model, (x,), target, F.mse_loss, 2, "modulo_shard(mp=2,scheme=B/K)", pins={"1": "conv", **pins})
    assert program.verify(steps=1).holds
    result = edited(program, r"comm\.scale_by_share\(", "(").verify(steps=1)
    assert not result.holds and "mse_loss" in result.where and "2 times" in result.where


@pytest.mark.parametrize("make", [late, mixed])
def test_late_multiplied_layers_that_are_never_multiplied_are_named(make: Callable[[], CompiledProgram]) -> None:
    result = edited(make(), r"\n +\w+\.multiply\(\).*", "").verify(steps=1)
    assert not result.holds and re.match(r"fc\d\.weight \(gradient\)", result.worst)
    assert re.match(r"layer fc\d", result.where), result.where


# -- what cannot run ---------------------------------------------------------------------------------------------------

CRASHES: dict[str, Case] = {
    "features that are not gathered": (
        sharded, r"comm\.shard\((\w+), features=14\)", r"\1", "shapes cannot be multiplied"),
    "examples that are not gathered": (
        sharded, r"fc\.modulo\(cut0\.detach\(\)\)", "cut0.detach()", r"batch_size \(4\).*\(8\)"),
    "targets that are not gathered": (sharded, r"fc\.modulo\(target\)", "target", r"batch_size \(8\).*\(4\)"),
    "neither": (
        sharded, r"_group = fc\.modulo\((\w+)(\.detach\(\))?\)", r"_group = \1.detach()", "-> batch.*should be 8"),
    "a turn that is left out": (lambda: sharded(scheme="B/K"), r"fc\.(microbatches\(\))", r"fc.\1[:1]", "shape"),
    "all examples of the group where one's own are read": (
        mixed, OWN, r"comm.shard(\1, features=14)", "Mismatch in shape"),
    "a part of a gradient where all of it is read": (
        mixed, r"cut1\.backward\((cut1_stage2\.grad)\)", r"cut1.backward(\1[:2])", "Mismatch in shape"),
    "a group that not all its ranks know": (sharded, r"group=\(0, 1\)", "group=(0,)", "not one of the group's ranks"),
    "replicas that are not": (lambda: sharded(4), r"replicas=\(0, 2\)", "replicas=(0, 1)", "not one of the group's"),
}  # fmt: skip


@sampled("name", CRASHES, one_in=3, whole=True)
def test_what_is_missing_stops_the_ranks_and_tells_the_rank(name: str) -> None:
    make, pattern, new, words = CRASHES[name]
    with pytest.raises((RuntimeError, ValueError), match=words) as error:
        edited(make(), pattern, new).verify(steps=1)
    assert any("rank" in note for note in error.value.__notes__)


def test_ranks_that_do_not_sum_the_same_gradients_are_told_apart() -> None:
    program = edited(hybrid(), r"with conv\.all_reduce\(stage, CONV_BUCKETS\):", "if True:")  # rank 0 has both roles
    with pytest.raises(Mismatch, match=r"rank 0 and rank 1 disagree(.|\n)*all_reduce \(30,\)"):
        program.verify(steps=1)


# -- actions -----------------------------------------------------------------------------------------------------------


def without(program: LoweredProgram, dropped: str) -> LoweredProgram:
    """The program without an action, in its printed form, in every part."""
    parts = [replace(p, actions=tuple(a for a in p.actions if str(a) != dropped)) for p in program.rank_programs]
    assert parts != list(program.rank_programs), f"{dropped} is no action"
    return replace(program, rank_programs=tuple(parts))


def swapped(program: LoweredProgram, first: str, second: str) -> LoweredProgram:
    """The program with two actions in each other's place, in every part that has both."""

    def swap(actions: tuple[Action, ...]) -> tuple[Action, ...]:
        names = [str(a) for a in actions]
        if not {first, second} <= set(names):
            return actions
        i, j = names.index(first), names.index(second)
        found = list(actions)
        found[i], found[j] = found[j], found[i]
        return tuple(found)

    return replace(program, rank_programs=tuple(replace(p, actions=swap(p.actions)) for p in program.rank_programs))


DROPPED = [
    (mixed, "stage2: send cut2 -> stage3", "rank 0 receives cut2.stage2.stage3[4:8], which rank 1 never sends"),
    (mixed, "stage3: recv cut2 <- stage2", "rank 1 sends cut2.stage2.stage3[4:8], which rank 0 never receives"),
    (mixed, "stage2: recv_grad cut2 <- stage3", "rank 0 sends d_cut2.stage2.stage3[4:8], which rank 1 never receives"),
    (mixed, "stage3: sum_loss", "rank 0 sums X, E stage2.fc7[0]"),
    (hybrid, "fc: send_grad cut0 -> conv", "rank 1 receives d_cut0.conv.fc[4:8], which rank 0 never sends"),
    (hybrid, "conv: send target -> fc", "rank 0 receives target.conv.fc[4:8]"),
]


def test_a_dropped_message_is_named_with_both_its_ranks() -> None:
    for make, action, words in DROPPED:
        assert any(words in problem for problem in sends_meet_receives(without(make().program, action))), action


def test_swapped_actions_make_a_circle_or_meet_something_else() -> None:
    circle = swapped(mixed().program, "stage2: send cut2 -> stage3", "stage2: sum_loss")
    assert any("deadlock in a cycle" in problem and "cut2" in problem for problem in no_deadlock(circle))
    crossed = swapped(mixed().program, "stage1: modulo cut0", "stage1: forward")
    one_part = replace(crossed, rank_programs=(crossed.rank_programs[0], *mixed().program.rank_programs[1:]))
    (problem,) = (p for p in sends_meet_receives(one_part) if "entry" in p)
    assert "entry cut0[0]" in problem and "stage1.relu_1_own[0]" in problem


def test_a_bucket_that_may_begin_before_what_its_sum_waits_for_is_a_deadlock() -> None:
    """Rank 1 sums a bucket with rank 0 and a norm with rank 2, which rank 0 waits for: the norm must come first."""

    def op(kind: str, what: What, ranks: tuple[int, ...], inside: bool) -> WireOp:
        bucket = 0 if what is What.BUCKET else None
        within = ("conv", 0) if inside else None
        return WireOp(kind, Payload(what, "value", "conv", bucket=bucket), ranks, (2,), torch.float32, within=within)

    bucket, norm = (
        op("collective", what, ranks, True) for what, ranks in ((What.BUCKET, (0, 1)), (What.NODE_GRADIENT, (1, 2)))
    )
    wires = [[op("recv", What.CUT, (2,), False), bucket], [norm, bucket], [norm, op("send", What.CUT, (0,), False)]]
    program = planned(3, "data_parallel").program
    with patch.object(deadlock, "wire", lambda _, rank: wires[rank]):
        (problem,) = no_deadlock(program)
        assert "the backward of conv[0]" in problem and "rank 2: send value.conv" in problem
        wires[0].reverse()  # it sums before it waits
        assert not no_deadlock(program)
    with patch.object(deadlock, "wire", lambda _, rank: [replace(op, within=None) for op in wires[rank]]):
        wires[0].reverse()
        assert not no_deadlock(program), "in the order of the wire it ends"


def test_a_layer_that_is_multiplied_after_the_gradients_have_travelled_is_named() -> None:
    program = swapped(late().program, "all: multiply", "all: all_reduce bucket0")
    assert actions_are_complete(program) == ["all: all: all_reduce bucket0 comes before all: multiply"]


def test_late_multiplied_layers_are_multiplied_while_other_gradients_travel() -> None:
    lines = late().files["all.py"].splitlines()
    k = next(k for k, line in enumerate(lines) if line.startswith("    with comm.all_reduce(stage, BUCKETS):"))
    assert [line.split("#")[0].rstrip() for line in lines[k + 1 : k + 3]] == [
        "        loss.backward()",
        "        comm.multiply()",
    ]


LOCAL = [
    (sharded, "fc: modulo cut0"),
    (sharded, "fc: modulo_grad cut0"),
    (mixed, "stage1: modulo cut0"),
    (mixed, "stage1: modulo_grad cut0"),
    (late, "all: multiply"),
    (hybrid, "conv: all_reduce bucket0"),
    (hybrid, "conv: backward"),
    (lambda: sharded(scheme="B/K"), "fc: modulo cut0"),
]


def test_an_action_that_all_ranks_leave_out_is_named_by_a_check() -> None:
    for make, action in LOCAL:
        program = without(make().program, action)
        problems = [problem for check in Schedule.ensures for problem in check(program)]
        assert any(action.split()[-1] in problem for problem in problems), problems


def test_a_gradient_that_never_arrived_is_told_where_the_group_returns_it() -> None:
    program = edited(mixed(), r"    cut1\.backward\(.*\)\n", "")
    with pytest.raises(RuntimeError, match="no gradient arrived"):
        program.verify(steps=1)


def test_an_error_in_an_edited_program_names_its_file_and_line() -> None:
    program = edited(sharded(), r"comm\.shard\((.*), features=14\)", r"\1")
    with pytest.raises(RuntimeError) as caught:
        program.verify(steps=1)
    assert any(re.match(r"in step 1, conv_fc.py, line \d+: .*fc", note) for note in caught.value.__notes__)
