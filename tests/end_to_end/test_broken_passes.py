"""Passes that forget what a divided or late-multiplied layer needs are stopped by a check that names the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.nn.functional as F
from torch import fx

from splitc.capture.capture import capture
from splitc.checks.graph import buckets_hold_every_gradient, cuts_are_communicated, stages_cover_the_graph
from splitc.compiled import CompiledProgram
from splitc.errors import InternalError
from splitc.ir import comm_ops
from splitc.ir.pass_manager import run_passes
from splitc.ir.program import PlacedProgram
from splitc.ir.transitions import all_to_all, copy_to_group, modulo, reduce_from_group, shard
from splitc.passes.assign_states import AssignStates
from splitc.passes.rewriting import ON_THE_GRAPH
from tests.end_to_end.test_broken_strategies import entered, late, mixed, rows, sharded


def test_a_gradient_that_is_summed_in_another_way_than_planned_is_named() -> None:
    program = late().program
    stage = program.stage("all")
    twice = replace(stage, buckets=(*stage.buckets, ("fc6.weight",)))
    problems = buckets_hold_every_gradient(replace(program, stages=(twice,)))
    assert problems == [
        "the gradient of fc6.weight in role all is summed 1 times by all_reduce, 1 times by late_multiply, not once "
        "by late_multiply"
    ]


def test_a_layer_that_lost_its_late_multiply_is_named() -> None:
    program = late().program
    stage = program.stage("all")
    node = next(n for n in stage.graph.nodes if n.name == "fc7")
    assert node.target is comm_ops.late_multiply
    node.target = F.linear
    assert buckets_hold_every_gradient(program)[0].startswith("the gradient of fc7.weight in role all is summed not at")


def test_a_dropped_bucket_of_a_divided_role_is_named() -> None:
    program = sharded(4).program
    stage = program.stage("fc")
    problems = buckets_hold_every_gradient(
        replace(program, stages=tuple(replace(s, buckets=()) if s is stage else s for s in program.stages))
    )
    assert len(problems) == 6 and all("role fc is summed not at all, not once by all_reduce" in p for p in problems)


def test_a_cut_that_skips_its_way_into_a_group_is_named() -> None:
    program = mixed().program
    got = next(n for n in program.graph.nodes if n.target is modulo)
    got.replace_all_uses_with(got.args[0].args[0].args[0])
    assert any("flatten of role stage0 is read by" in problem for problem in cuts_are_communicated(program))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [shard, copy_to_group, reduce_from_group])
def test_a_node_that_is_lost_when_the_graph_is_split_is_named(lost: Callable[..., object]) -> None:
    program = MAKERS[lost]().program
    node = _cut_out(program.stage("fc").graph, lost)
    assert any(p.startswith(f"{node} ") and "missing from role fc" in p for p in stages_cover_the_graph(program))


FORGOTTEN = [
    (sharded, shard, r"fc7 \(.*\) needs relu_1 in state replicate, but it is features"),
    (rows, reduce_from_group, r"needs fc7_part in state replicate, but it is partial"),
    (entered, copy_to_group, r"fc \(.*\) computes a part of what follows from norm, whose gradient is never summed"),
    pytest.param(mixed, all_to_all, r"needs relu_1 in state batch, but it is features"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "lost", "words"), FORGOTTEN)
def test_a_pass_that_forgets_a_node_of_a_divided_layer_does_not_leave_the_compiler(
    make: Callable[[], CompiledProgram], lost: Callable[..., object], words: str
) -> None:
    class Forgetful(AssignStates):
        def run(self, program: PlacedProgram) -> PlacedProgram:
            program = super().run(program)
            _cut_out(program.graph, lost)
            return program

    with pytest.raises(InternalError, match=rf"assign-states broke the program(.|\n)*{words}"):
        rewritten_by(make(), Forgetful())


@pytest.mark.parametrize(("features", "words"), [(14, "never summed over the group"), (5, "computes all of it")])
def test_a_flag_that_says_the_wrong_of_a_gradient_does_not_leave_the_compiler(features: int, words: str) -> None:
    class Mistaken(AssignStates):
        def run(self, program: PlacedProgram) -> PlacedProgram:
            program = super().run(program)
            (node,) = (n for n in program.graph.nodes if n.target is shard and n.kwargs["features"] == features)
            node.update_kwarg("partial", not node.kwargs.get("partial", True))
            return program

    with pytest.raises(InternalError, match=rf"assign-states broke the program(.|\n)*{words}"):
        rewritten_by(sharded(), Mistaken())


def rewritten_by(whole: CompiledProgram, broken: AssignStates) -> PlacedProgram:
    """The program, from its plan on, with a broken pass in place of its own."""
    fresh = capture(whole._model, whole._example)
    fresh = replace(fresh, loss_terms=whole.program.loss_terms, costs=whole.program.costs)
    passes = [broken if isinstance(each, AssignStates) else each for each in ON_THE_GRAPH]
    return run_passes(fresh.placed(whole.plan), passes)


MAKERS: dict[Callable[..., object], Callable[[], CompiledProgram]] = {
    shard: sharded,
    copy_to_group: entered,
    reduce_from_group: rows,
}
"""A program that has the node."""


def _cut_out(graph: fx.Graph, lost: Callable[..., object]) -> str:
    """Take the first node of that function out of a graph; its name."""
    node = next(n for n in graph.nodes if n.target is lost)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
    return str(node.name)
