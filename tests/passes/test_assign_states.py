"""Where a divided layer's features are gathered, where its gradients are summed, and what works on parts of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from inspect import cleandoc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.ir.graph import is_entry
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram
from splitc.ir.transitions import copy_to_group, name_of, reduce_from_group, transition_of
from splitc.passes.assign_states import AssignStates
from splitc.runtime.collectives.layouts import State, Transition
from tests.support.compiled import compiled
from tests.support.models import CLASSES, made
from tests.support.printed import changes, placed, two_layers
from tests.support.sampling import sampled

COLUMNS = Placement(holding="sharded", group=2, split="columns")
ROWS = Placement(holding="sharded", group=2, split="rows")
GROUPED = Placement(group=2)
Run = Callable[[Any, Tensor], Tensor]


def divided(run: Run, *shape: int, loss: Any = F.cross_entropy, **pins: Placement) -> CompiledProgram:
    """A model of linear layers a (8 -> 7), b (7 -> 6) and fc (7 -> classes), which is exact whatever is inserted."""
    children = {"a": nn.Linear(8, 7), "b": nn.Linear(7, 6), "fc": nn.Linear(7, CLASSES), "norm": nn.LayerNorm(7)}
    names = run.__code__.co_names
    model = made(run, **{name: child for name, child in children.items() if name in names}).double()
    if "a" not in names:
        del model.a
    x = torch.randn(4, *(shape or (8,)), dtype=torch.float64)
    program = compiled(model, (x,), torch.randint(CLASSES, (4,)), loss, 2, "mixed", pins={"*": GROUPED, **pins})
    result = program.verify(steps=2)
    assert result.holds, str(result)
    return program


def inserted(program: CompiledProgram) -> dict[str, str]:
    """Node -> the transition that was inserted there; entries aside."""
    nodes = program.program.graph.nodes
    found = {node.name: transition_of(node) for node in nodes if not is_entry(node)}
    return {name: _word(transition) for name, transition in found.items() if transition is not None}


def entries(program: CompiledProgram) -> list[str]:
    """How the groups bring to their states what arrives and has a gradient."""
    (stage,) = (stage for stage in program.program.stages if stage.role in program.plan.groups)
    return [_word(cut.entry) for cut in stage.receives if cut.gradient and cut.entry is not None]


def _word(transition: Transition) -> str:
    """The node of a transition; "partial" where its gradients are summed."""
    divided = transition.target is State.DIVIDED and transition.source is not State.REPLICATE
    return f"{name_of(transition)} partial" if divided else name_of(transition)


# -- what reads parts --------------------------------------------------------------------------------------------------

ON_PARTS: dict[str, Run] = {
    "gelu": lambda m, x: m.fc(F.gelu(m.a(x))),
    "a module": lambda m, x: m.fc(torch.sigmoid(F.leaky_relu(m.a(x), 0.2))),
    "in place": lambda m, x: m.fc(F.relu(m.a(x), inplace=True)),
    "a method": lambda m, x: m.fc(m.a(x).tanh()),
    "numbers": lambda m, x: m.fc(2.0 * m.a(x) - 1.0),
    "a power": lambda m, x: m.fc(m.a(x) ** 2 / 3.0),
    "two parts of one layer": lambda m, x: m.fc(torch.tanh(h := m.a(x)) * torch.sigmoid(h)),
    "dropout": lambda m, x: m.fc(F.dropout(m.a(x), 0.5, m.training)),
}


@pytest.mark.slow
@sampled("name", ON_PARTS, one_in=9)
def test_elementwise_functions_work_on_parts_and_one_gather_follows_them(name: str) -> None:
    found = inserted(divided(ON_PARTS[name], a=COLUMNS, fc=COLUMNS))
    assert list(found.values()) == ["shard partial", "shard"], found
    assert "a_whole" not in found, "it is gathered after the function"


BESIDE_OTHERS: dict[str, tuple[Run, str]] = {
    "a sum of features": (lambda m, x: m.fc(m.a(x) + m.a(x).sum(1, keepdim=True)), "reduce_from_group partial"),
    "another value": (lambda m, x: m.fc(m.a(x) * x[:, :7]), "slice_features"),
    "where": (lambda m, x: m.fc(torch.where(x[:, :7] > 0, m.a(x), 0.0)), "slice_features"),
}


@pytest.mark.parametrize("name", BESIDE_OTHERS)
def test_so_do_functions_of_parts_and_of_what_has_no_parts_by_itself(name: str) -> None:
    run, other = BESIDE_OTHERS[name]
    found = inserted(divided(run, a=COLUMNS, fc=COLUMNS))
    assert list(found.values()) == [other, "shard partial", "shard"], found


ON_THE_WHOLE: dict[str, Run] = {
    "softmax": lambda m, x: m.fc(F.softmax(m.a(x), -1)),
    "a norm": lambda m, x: m.fc(m.norm(m.a(x))),
    "an index": lambda m, x: m.fc(m.a(x)[:, [6, 5, 4, 3, 2, 1, 0]]),
    "a reshape": lambda m, x: m.fc(m.a(x).view(-1, 7, 1).flatten(1)),
    "cat": lambda m, x: m.fc(torch.cat([m.a(x)[:, 3:], m.a(x)[:, :3]], 1)),
}


@sampled("name", ON_THE_WHOLE, one_in=9)
def test_everything_else_reads_what_was_gathered(name: str) -> None:
    """Each of its readers has the whole gradient then, and what the next divided layer reads is summed by `enter`."""
    found = inserted(divided(ON_THE_WHOLE[name], a=COLUMNS, fc=COLUMNS))
    assert "copy_to_group" in found.values() and "shard partial" not in found.values(), found
    assert any(node.startswith("a") and kind == "shard" for node, kind in found.items()), found


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_reads_the_whole_and_its_gradient_is_not_summed() -> None:
    found = inserted(divided(lambda m, x: m.fc(m.a(x)), fc=COLUMNS))
    assert list(found.values())[-1] == "shard"


@pytest.mark.slow
def test_two_divided_readers_of_one_value_share_a_gather() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.a(x))
        return m.b(h)[:, :CLASSES] + m.fc(h)

    found = inserted(divided(run, a=COLUMNS, b=COLUMNS, fc=COLUMNS))
    assert sorted(found.values()) == ["shard", "shard", "shard partial"], found


@pytest.mark.slow
def test_a_divided_and_a_whole_reader_of_one_value_part_at_an_enter() -> None:
    program = divided(lambda m, x: m.fc(h := F.relu(m.a(x))) + m.b(h)[:, :CLASSES], a=COLUMNS, fc=COLUMNS)
    found = inserted(program)
    assert sorted(found.values()) == ["copy_to_group", "shard", "shard"], found
    graph = program.program.graph
    (enter,) = (n for n in graph.nodes if n.target is copy_to_group)
    assert [user.name for user in enter.users] == ["fc"]


def test_an_input_that_only_divided_layers_read_is_summed_where_it_returns_and_needs_no_enter() -> None:
    def first(m: Any, x: Tensor) -> Tensor:
        return m.fc(F.relu(m.a(x)))

    program = divided(first, a=Placement("conv", "replicated", group=1), fc=COLUMNS)
    assert list(inserted(program).values()) == ["shard"] and entries(program) == ["modulo partial"]


@pytest.mark.slow
def test_an_input_that_the_group_reads_whole_returns_without_a_sum() -> None:
    def first(m: Any, x: Tensor) -> Tensor:
        return m.fc(m.norm(F.relu(m.a(x))))

    program = divided(first, a=Placement("conv", "replicated", group=1), fc=COLUMNS)
    assert list(inserted(program).values()) == ["copy_to_group", "shard"] and entries(program) == ["modulo"]


@pytest.mark.slow
def test_what_needs_no_gradient_is_not_summed() -> None:
    program = divided(lambda m, x: m.fc(F.relu(m.a(x))), a=COLUMNS)
    assert "copy_to_group" not in inserted(program).values(), "the images train nothing"
    assert entries(program) == []


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_after_columns_need_one_sum_and_no_gather_and_their_bias_is_added_after_it() -> None:
    program = divided(lambda m, x: m.fc(F.gelu(m.a(x))), a=COLUMNS, fc=ROWS)
    assert list(inserted(program).values()) == ["reduce_from_group"]
    stage = program.program.stage("head")
    assert dict(stage.shards) == {"a.weight": 0, "a.bias": 0, "fc.weight": 1}, "the bias is whole"
    (total,) = (n for n in program.program.graph.nodes if n.target is reduce_from_group)
    (after,) = total.users
    assert [str(n.target) for n in after.all_input_nodes if n.op == "get_attr"] == ["fc.bias"]


@pytest.mark.slow
def test_a_dropout_on_parts_draws_a_mask_for_its_part_and_one_on_the_whole_does_not() -> None:
    text = "".join(divided(ON_PARTS["dropout"], a=COLUMNS, fc=COLUMNS).files.values())
    assert re.search(r"comm\.dropout\(.*features=\d+", text)
    whole = divided(lambda m, x: m.fc(F.dropout(m.norm(m.a(x)), 0.5, m.training)), a=COLUMNS, fc=COLUMNS)
    assert "comm.dropout(" in "".join(whole.files.values())
    assert "features=" not in re.sub(r"comm\.(shard|all_to_all)\(.*", "", "".join(whole.files.values()))


@pytest.mark.slow
def test_values_of_more_dims_are_divided_along_their_last() -> None:
    program = divided(lambda m, x: m.fc(F.relu(m.a(x))).mean(1), 3, 8, a=COLUMNS, fc=COLUMNS)
    assert list(inserted(program).values()) == ["shard partial", "shard"]


@pytest.mark.slow
def test_a_layer_that_is_used_twice_is_divided_at_both_uses() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(torch.tanh(m.a(x)) + torch.tanh(m.a(x * 2.0)))

    assert list(inserted(divided(run, a=COLUMNS, fc=COLUMNS)).values()) == ["shard partial", "shard"]


# -- the printed graph -------------------------------------------------------------------------------------------------


def test_a_layer_divided_by_columns_reads_a_gathered_value() -> None:
    program = placed(two_layers(), 2, "mixed", pins={"fc1": COLUMNS, "fc2": COLUMNS})
    assert changes(AssignStates, program) == cleandoc("""
    + target_head_group = modulo(target_head, partial=False) # f32[b, 5] head
    + input_1_head_group = modulo(input_1_head, partial=False) # f32[b, 8] head
    - fc1 = self.fc1(input_1_head) # f32[b, 6] head
    + fc1 = self.fc1(input_1_head_group) # f32[b, 6] head
    + middle_whole = shard(middle, features=6) # f32[b, 6] head
    - fc2 = self.fc2(middle) # f32[b, 5] head
    + fc2 = self.fc2(middle_whole) # f32[b, 5] head
    + fc2_whole = shard(fc2, features=5, partial=False) # f32[b, 5] head
    - mse_loss = mse_loss(fc2, target_head, reduction='mean') # f32[] head
    + mse_loss = mse_loss(fc2_whole, target_head_group, reduction='mean') # f32[] head
    """)


def test_rows_read_a_slice_of_what_is_whole_and_sum_to_the_state_that_is_asked_for() -> None:
    program = placed(two_layers(), 2, "mixed", pins={"fc1": ROWS, "fc2": replace(ROWS, state="batch")})
    assert changes(AssignStates, program) == cleandoc("""
    - fc1 = self.fc1(input_1_head) # f32[b, 6] head
    + input_1_head_group = all_to_all(input_1_head, to='features', features=8) # f32[b, 8] head
    + fc1_weight = self.fc1.weight # head
    + fc1_bias = self.fc1.bias # head
    + fc1_part = linear(input_1_head_group, fc1_weight) # f32[b, 6] head
    + fc1_sum = reduce_from_group(fc1_part) # f32[b, 6] head
    + fc1 = add(fc1_sum, fc1_bias) # f32[b, 6] head
    - fc2 = self.fc2(middle) # f32[b, 5] head
    + middle_part = slice_features(middle, features=6) # f32[b, 6] head
    + fc2_weight = self.fc2.weight # head
    + fc2_bias = self.fc2.bias # head
    + fc2_part = linear(middle_part, fc2_weight) # f32[b, 5] head
    + fc2_sum = reduce_scatter(fc2_part, to='batch') # f32[b, 5] head
    + fc2 = add(fc2_sum, fc2_bias) # f32[b, 5] head
    - mse_loss_scale_by_share = scale_by_share(mse_loss) # f32[] head
    + mse_loss_scale_by_share = scale_by_share(mse_loss, own=True) # f32[] head
    + all_reduce = all_reduce(role='head', parameters=('fc2.bias',), own=('fc2.bias',)) # head
    """)


@pytest.mark.slow
def test_functional_linear_layers_are_divided_by_columns_and_rows() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, net.w, net.v).tanh(), net.w2, net.v2)

    shapes = {"w": (16, 8), "v": (16,), "w2": (CLASSES, 16), "v2": (CLASSES,)}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    model = made(run, **parameters).double()
    x, target = torch.randn(4, 8, dtype=torch.float64), torch.randint(CLASSES, (4,))
    program = compiled(model, (x,), target, F.cross_entropy, 2, "modulo_shard(mp=2)")
    assert {place.split for place in program.plan.placements.values() if place.split} == {"columns", "rows"}
    assert program.verify(steps=2).holds


@pytest.mark.slow
def test_a_normalisation_after_rows_reads_the_whole_sum() -> None:
    """The last layer's outputs of independent subnets (IST 3.3), when ranks evaluate by their shards."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    model.append(nn.BatchNorm1d(4, affine=False))
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    program = compiled(model, x, y, F.cross_entropy, 2, "independent_subnets").program
    assert isinstance(program.evaluation, LoweredProgram)
    shards = {name: dim for stage in program.evaluation.stages for name, dim in stage.shards.items()}
    assert shards["1.running_mean"] == 0 and "4.running_mean" not in shards


@pytest.mark.slow
def test_what_ranks_use_on_their_own_examples_is_summed_last() -> None:
    """The bias of a first layer is the last to have its gradient: no other bucket waits for it."""
    rows = Placement(group=2, holding="sharded", split="rows", state="batch")
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    pins = {"2": rows, "4": replace(rows, split="columns", state=None)}
    program = compiled(model, (torch.randn(4, 6),), torch.randint(CLASSES, (4,)), F.cross_entropy, 4, pins=pins)
    (stage,) = (stage for stage in program.program.stages if stage.own_sums)
    assert stage.own_sums == ("2.bias",)
    assert len(stage.buckets) > 1 and stage.buckets[-1] == ("2.bias",)
