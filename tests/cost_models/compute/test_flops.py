"""What the layers of a program compute and move: op by op, at any batch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from splitc.cost_models.compute.counting import OpCounter
from splitc.cost_models.compute.flops import layer_costs
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.ir.graph import info, set_info
from splitc.ir.program import Program
from splitc.report.figures import as_json
from splitc.report.text import report
from tests.support.capturing import capture
from tests.support.compiled import compiled
from tests.support.models import BATCH, CASES, made
from tests.support.op_sums import bytes_of, flops_of
from tests.support.sampling import in_tiers, sampled


def costs_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, CostLine]:
    return layer_costs(capture(model, x, y, F.cross_entropy))


@cache
def case(name: str) -> tuple[Program, dict[str, CostLine]]:
    torch.manual_seed(0)
    program = capture(*CASES[name].make())
    return program, layer_costs(program)


def everything(costs: dict[str, CostLine], batch: int) -> list[LayerCost]:
    return [line.at(batch) for line in costs.values()]


@pytest.mark.slow
@sampled("name", ["vgg", "alexnet", "mlp", "resnet", "frozen_trunk", "language_model"], one_in=9)
@sampled("batch", [2 * BATCH, BATCH], one_in=2)
def test_a_program_is_counted_as_its_model_runs(name: str, batch: int) -> None:
    """FLOPs to the last one; bytes up to what the trace writes in another way, as a tensor's parts taken one by one."""
    _, costs = case(name)
    model, example, target, loss = CASES[name].make()
    rows = torch.arange(batch) % BATCH
    real: list[OpCost] = []
    with OpCounter(real.append) as counter:
        value = loss(model(example[rows]), target[rows])
        counter.backward = True
        value.backward()
    for backward in (False, True):
        ours = [op for cost in everything(costs, batch) for op in cost.ops if op.backward == backward]
        theirs = [op for op in real if op.backward == backward and op.name != "index"]
        assert sum(op.flops for op in ours) == sum(op.flops for op in theirs)
        assert sum(op.bytes_accessed for op in ours) == pytest.approx(sum(op.bytes_accessed for op in theirs), rel=0.1)


@pytest.mark.slow
@in_tiers("cases", CASES, one_in=5)
def test_more_examples_never_cost_less_and_nothing_is_free(cases: list[Any]) -> None:
    for name in cases:
        program, of_layers = case(name)
        for line in of_layers.values():
            costs = [line.at(batch) for batch in (1, 2, 3, BATCH, 10 * BATCH, 1000)]
            for less, more in pairwise(costs):
                assert less.saved_bytes <= more.saved_bytes, name
                for a, b in ((less.forward_ops, more.forward_ops), (less.backward_ops, more.backward_ops)):
                    assert flops_of(a) <= flops_of(b) and bytes_of(a) <= bytes_of(b), name
                assert sum(op.kernel_launches for op in less.ops) <= sum(op.kernel_launches for op in more.ops), name
        for layer in program.layers:
            cost = of_layers[layer.name].at(BATCH)
            assert bytes_of(cost.forward_ops) > 0 and sum(op.kernel_launches for op in cost.ops) >= 1, name
            assert cost.batch == BATCH and not cost.unknown_ops, name
            trains = any(program.tensors[name].trainable for name in layer.tensors)
            assert not trains or bytes_of(cost.backward_ops) > 0, name


@pytest.mark.slow
def test_the_sums_of_a_layer_are_those_of_its_ops() -> None:
    for cost in everything(case("resnet")[1], 7):
        assert sorted(map(repr, (*cost.forward_ops, *cost.backward_ops))) == sorted(map(repr, cost.ops))
        assert not any(op.backward for op in cost.forward_ops) and all(op.backward for op in cost.backward_ops)
        assert cost.flops == flops_of(cost.ops)


def test_a_weight_costs_its_bytes_at_every_batch_and_an_activation_for_each_example() -> None:
    (line,) = costs_of(nn.Linear(300, 10), torch.randn(4, 300), torch.arange(4)).values()
    (product,) = (op for op in line.at(40).ops if op.name == "addmm")
    assert product.bytes_accessed == 4 * (300 * 10 + 10 + 40 * (300 + 10))
    assert product.flops == 2 * 40 * 300 * 10


# -- backward ----------------------------------------------------------------------------------------------------------


def test_a_frozen_layer_below_all_others_has_no_backward_and_the_next_one_half() -> None:
    low, high = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 5)
    frozen = made(lambda m, x: m.high(F.relu(m.low(x))), low=low, high=high)
    costs = costs_of(frozen, torch.randn(4, 8), torch.arange(4))
    assert flops_of(costs["low"].at(4).backward_ops) == bytes_of(costs["low"].at(4).backward_ops) == 0
    assert flops_of(costs["high"].at(4).backward_ops) == flops_of(costs["high"].at(4).forward_ops)


def test_what_does_not_reach_the_loss_has_no_backward() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x) + m.aside(x).detach().mean()

    model = made(run, fc=nn.Linear(8, 5), aside=nn.Linear(8, 8))
    costs = costs_of(model, torch.randn(4, 8), torch.arange(4))
    assert flops_of(costs["aside"].at(4).forward_ops) > 0
    assert flops_of(costs["aside"].at(4).backward_ops) == 0


def test_gradients_of_a_value_with_two_readers_are_added_up() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.fc(h + F.relu(h * 2))

    costs = costs_of(made(run, first=nn.Linear(8, 8), fc=nn.Linear(8, 5)), torch.randn(4, 8), torch.arange(4))
    sums = [op for op in costs["first"].at(4).ops if op.backward and op.name == "add"]
    assert [op.bytes_accessed for op in sums] == [3 * 4 * 4 * 8]


@pytest.mark.slow
def test_a_tied_weight_gets_the_sum_of_its_gradients() -> None:
    ops = [op for cost in everything(case("language_model")[1], BATCH) for op in cost.ops]
    table = next(h.nbytes for h in case("language_model")[0].tensors.values() if len(h.names) > 1)
    assert any(op.backward and op.name == "add" and op.bytes_accessed == 3 * table for op in ops)


@pytest.mark.slow
def test_counting_leaves_no_gradients_behind() -> None:
    program, _ = case("mlp")
    layer_costs(program)
    assert all(parameter.grad is None for parameter in program.root.parameters())


# -- ops that nobody knows ---------------------------------------------------------------------------------------------


def waves(m: Any, x: Tensor) -> Tensor:
    return m.high(torch.fft.rfft(m.low(x)).abs())


@pytest.mark.slow
def test_an_op_that_nobody_knows_is_priced_by_its_bytes_and_the_report_says_so() -> None:
    model = made(waves, low=nn.Linear(8, 8), high=nn.Linear(5, 5))
    program = compiled(model, (torch.randn(4, 8),), torch.arange(4), F.cross_entropy, 2).program
    cost = program.costs["low"].at(4)
    assert cost.unknown_ops[0] == "_fft_r2c"
    assert [op.bytes_accessed for op in cost.ops if op.name == "_fft_r2c"] == [4 * 4 * 8 + 8 * 4 * 5]
    assert "since their FLOPs are unknown: _fft_r2c" in " ".join(report(program).split())
    assert as_json(program)["by_bytes"] == list(cost.unknown_ops)


@pytest.mark.slow
def test_the_report_is_silent_where_all_ops_are_known() -> None:
    program = compiled(nn.Linear(6, 3), (torch.randn(4, 6),), torch.arange(4) % 3, F.cross_entropy, 2).program
    assert "not known" not in report(program) and as_json(program)["by_bytes"] == []


@torch.library.custom_op("splitc_tests::stubborn", mutates_args=())
def stubborn(x: Tensor) -> Tensor:
    return 2 * x


@stubborn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def only_real(context: object, gradient: Tensor) -> Tensor:
    assert not isinstance(gradient, FakeTensor), "fails on fake tensors"
    return 2 * gradient


stubborn.register_autograd(only_real)


def test_a_backward_that_fake_tensors_cannot_run_is_taken_for_twice_its_forward_and_told() -> None:
    model = made(lambda m, x: m.high(m.low(x)), low=nn.Linear(8, 8), high=nn.Linear(8, 5))
    program = capture(model, torch.randn(4, 8), torch.arange(4), F.cross_entropy)
    low = next(node for node in program.graph.nodes if node.name == "low")
    with program.graph.inserting_after(low):
        between = program.graph.call_function(torch.ops.splitc_tests.stubborn.default, (low,))
    set_info(between, info(low))
    low.replace_all_uses_with(between, lambda user: user is not between)
    costs = {name: line.at(4) for name, line in layer_costs(program).items()}
    assert flops_of(costs["low"].backward_ops) == 2 * flops_of(costs["low"].forward_ops)
    assert bytes_of(costs["low"].backward_ops) == 2 * bytes_of(costs["low"].forward_ops)
    assert costs["low"].unknown_ops == ("splitc_tests::stubborn", "splitc_tests::stubborn_backward", "addmm_backward")
    assert (
        flops_of(costs["high"].backward_ops) == 2 * flops_of(costs["high"].forward_ops)
        and not costs["high"].unknown_ops
    )
