"""Tuning: who is run, for how long, and what a failure does to the others."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.errors import ArgumentError, LaunchError, PlacementError
from splitc.ir.prediction import Tried
from splitc.runtime.spec import Input, RankSpec
from splitc.runtime.transport.base import Transport
from splitc.runtime.tuning import Finalist, fastest, outcome, rows_of, turns
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER
from tests.support.ranks import on_ranks


class Machine:
    """Runs finalists by a clock of its own: `seconds` of a step each, with a relative noise."""

    def __init__(self, seconds: list[float], noise: float, seed: int = 0) -> None:
        self.now, self.seconds, self.noise = 0.0, seconds, noise
        self.random = random.Random(seed)
        self.finalists = [Finalist(f"plan {k}", 10, 1.0) for k in range(len(seconds))]

    def run(self, budget: float, failing: tuple[int, ...] = ()) -> list[int]:
        order = []
        for k, slot in turns(self.finalists, budget, lambda: self.now):
            each, begin = self.finalists[k], self.now
            self.now += 0.5 + slot
            if k in failing:
                each.why = "it failed"
            else:
                each.seconds.append(self.seconds[k] * (1 + self.random.gauss(0, self.noise)))
            each.cost = self.now - begin
            order.append(k)
        return order


def test_the_fastest_is_found_in_time_and_the_better_ones_run_the_more_often() -> None:
    for seed in range(20):
        machine = Machine([1.3, 1.0, 1.06, 2.0, 1.5, 1.2], 0.01, seed)
        order = machine.run(60.0)
        assert fastest(machine.finalists) == 1
        assert machine.now <= 60.0
        assert {*order[:6]} == {*range(6)}, "each runs once before any runs again"
        assert order.count(1) >= order.count(5) >= order.count(3) == 1


def test_it_stops_when_the_rest_is_slower_by_more_than_chance() -> None:
    clear, alike = Machine([1.0, 2.0, 3.0], 0.005), Machine([1.0, 1.001, 3.0], 0.02)
    clear.run(60.0)
    alike.run(60.0)
    assert clear.now < 30 < 50 < alike.now


def test_orders_are_drawn_anew_so_that_drift_meets_all_alike() -> None:
    order = Machine([1.0, 1.0, 1.0, 1.0], 0.003).run(120.0)
    assert len({*zip(order[4::2], order[5::2], strict=False)}) > 1


def test_one_that_fails_is_out_and_the_others_go_on() -> None:
    machine = Machine([1.0, 1.2, 1.4], 0.005)
    order = machine.run(30.0, failing=(0,))
    assert order.count(0) == 1
    assert fastest(machine.finalists) == 1
    assert outcome(machine.finalists[0])["failed"] == "it failed"
    machine.run(30.0, failing=(0, 1, 2))
    with pytest.raises(LaunchError, match=r"no plan could be run:\n  plan 0: it failed\n  plan 1: it failed"):
        fastest([Finalist(f"plan {k}", 10, 1.0, why="it failed") for k in range(2)])


def test_a_batch_repeats_the_examples_of_the_users() -> None:
    inputs = {"x": Input((-1, 2), "float32"), "table": Input((3,), "float32"), "late": Input((2, -1), "float32")}
    tensors = {"x": torch.arange(6.0).reshape(3, 2), "table": torch.arange(3.0), "late": torch.arange(6.0).view(2, 3)}
    spec = RankSpec(1, 3, (), readers=(0, 1), batch_offsets=(0, 2, 6), inputs=inputs)
    x, table, late = rows_of(spec, tensors)
    assert x.tolist() == tensors["x"][[2, 0, 1, 2]].tolist()
    assert late.tolist() == tensors["late"][:, [2, 0, 1, 2]].tolist()
    assert table is tensors["table"]
    assert rows_of(RankSpec(2, 3, (), readers=(0, 1), batch_offsets=(0, 2, 6), inputs=inputs), tensors) == ()
    loose = RankSpec(0, 1, (), readers=(0,), batch_offsets=(0, 2), inputs={"x": Input((-2,), "float32")})
    with pytest.raises(LaunchError, match=r"a function divides the model's batches, .* leave tune out"):
        rows_of(loose, tensors)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 64))


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 64, (6,), generator=generator)


def _trained(
    transport: Transport, model: nn.Module, program: CompiledProgram
) -> tuple[list[float], dict[str, torch.Tensor] | None, str]:
    """Losses and the state after two steps of the worker that tuning gives, or the plan, and its plan."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make = partial(Worker, keys=first_names(model.state_dict()), optimizer=partial(torch.optim.SGD, lr=0.1))
    worker = program.worker_on(transport, make)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    at = worker.data_rank
    batch = () if at is None else tuple(each[slice(*worker.batch_offsets[at : at + 2])] for each in _data())
    losses = [float(worker.step(*batch)) for _ in range(2)]
    state = worker.state_dict()
    return losses, state, program.plan.to_json() if transport.rank == 0 else ""


def _on_ranks(**options: Any) -> list[tuple[list[float], dict[str, torch.Tensor] | None, str]]:
    """`_trained` on three ranks, whose programs are made before: threads would trace each other's models."""
    x, y = _data()
    models = [_model() for _ in range(3)]
    programs = list[CompiledProgram]()
    for model in models:
        program = splitc.compile(model, 3, (x,), y, F.cross_entropy, 6, CLUSTER, **options)
        assert isinstance(program, CompiledProgram)
        programs.append(program)
        program.validated()
    return on_ranks(3, lambda transport: _trained(transport, models[transport.rank], programs[transport.rank]))


@pytest.mark.slow
def test_training_after_tuning_is_that_of_the_plan_without() -> None:
    tuned = _on_ranks(tune=0.5)
    plan = splitc.Plan.from_json(tuned[0][2])
    rates = {each.plan: each.global_batch / each.measured for each in plan.prediction.tried if each.measured}
    assert len(rates) > 1
    assert max(rates, key=lambda each: rates[each]) == plan.hash, "the fastest of those that ran"
    again = _on_ranks(plan=plan)
    assert [each[0] for each in tuned] == [each[0] for each in again]
    (state, *_), (expected, *_) = ([each[1] for each in ranks] for ranks in (tuned, again))
    assert state is not None and expected is not None
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_tune_beside_a_plan_is_refused() -> None:
    with pytest.raises(PlacementError, match="tune chooses among plans"):
        splitc.compile(_model(), 3, plan=splitc.Plan("by hand", 3, {}, {}, {}), tune=1.0)
    for wrong in (-1, float("nan"), "60"):
        with pytest.raises((PlacementError, ArgumentError), match="tune is"):
            splitc.compile(_model(), 3, tune=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_was_tried_stays_where_prices_change() -> None:
    x, y = torch.randn(6, 8), torch.randint(0, 64, (6,))
    first = splitc.compile(_model(), 3, (x,), y, F.cross_entropy, cluster=CLUSTER)
    tried = (Tried("mixed 3", first.plan.hash, 18, 0.5, 0.6, 0.01, 3),)
    plan = replace(first.plan, prediction=replace(first.plan.prediction, tried=tried))
    again = splitc.compile(_model(), 3, (x,), y, F.cross_entropy, cluster="cpu16-1gbe", plan=plan)
    assert again.plan.prediction.priced_on != plan.prediction.priced_on
    assert again.plan.prediction.tried == tried
    assert "600 ms ± 1.0%" in again.report()
