"""Plans for several batches to an update: the plan, its bytes and its program know how many."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.wire import wire
from tests.support.compiled import compiled
from tests.support.ranks import adam, assert_same, batches_for, on_workers, one_process, plain, train

SLOW = load_cluster("v100-10gbe").with_bandwidth(5e7)
ALLOWED = 8


def perceptron(strategy: str, accumulate: int, world: int = 4) -> CompiledProgram:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    data = torch.randn(4096, 256), torch.randint(8, (4096,))
    return compiled(model, *data, F.cross_entropy, world, strategy, cluster=SLOW, accumulate=accumulate)


@pytest.mark.slow
def test_the_price_of_a_plan_is_that_of_its_batches_simulated() -> None:
    for strategy in ["data_parallel", "parameter_server", "layer_separation", "late_multiply"]:
        program = perceptron(strategy, ALLOWED)
        plan = program.plan
        step = simulate(program.program, SLOW, accumulate=plan.accumulate)
        assert plan.step_seconds == pytest.approx(step.step_seconds, rel=1e-6), strategy
        for phases in step.phases:
            sent = sum(op.per_step for op in wire(program.program, phases.rank))
            assert phases.sent_bytes == pytest.approx(sent), strategy


@pytest.mark.slow
def test_ranks_that_would_be_idle_work_where_batches_may_be_accumulated() -> None:
    alone, together = perceptron("auto", 1).plan, perceptron("auto", 64).plan
    assert together.accumulate > 1
    assert together.samples_per_second > 1.5 * alone.samples_per_second
    assert len(set().union(*together.roles.values())) > len(set().union(*alone.roles.values()))


@pytest.mark.slow
def test_no_more_batches_are_accumulated_than_make_it_faster() -> None:
    assert perceptron("single_device", ALLOWED).plan.accumulate == 1
    assert perceptron("data_parallel", ALLOWED).plan.accumulate == ALLOWED


def test_a_worker_accumulates_as_many_batches_as_its_plan_says() -> None:
    model, program = plain("data_parallel")
    planned = CompiledProgram(
        replace(program.program, plan=replace(program.plan, accumulate=3)), model, program._example, program._settings
    )
    lines = [" ".join(line.split()) for line in planned.files["rank1.py"].splitlines()]
    assert "accumulate=3, # batches to an update" in lines
    batches = batches_for(planned, 6)
    (losses, state), *_ = on_workers(planned, lambda worker: train(worker, batches), optimizer=adam)
    expected, own = one_process(copy.deepcopy(model), batches, adam, accumulate=3)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(state, own)


@pytest.mark.slow
def test_a_plan_with_batches_to_an_update_is_written_and_read() -> None:
    plan = perceptron("data_parallel", ALLOWED).plan
    assert Plan.from_json(plan.to_json()) == plan
    assert "accumulate" not in replace(plan, accumulate=1).to_json()


@pytest.mark.slow
def test_batches_to_an_update_are_a_whole_number() -> None:
    for accumulate in [0, -1, 1.5]:
        with pytest.raises(PlacementError, match=r"accumulate is .*; it must be a whole number of at least 1"):
            perceptron("data_parallel", accumulate)  # type: ignore[arg-type]


@pytest.mark.slow
def test_updates_in_every_microbatch_leave_nothing_to_accumulate() -> None:
    with pytest.raises(PlacementError, match="updates in every microbatch"):
        perceptron("modulo_shard(mp=2, scheme=B/K, updates=every)", 2)
    plan = perceptron("modulo_shard(mp=2, scheme=B/K, updates=every)", 1).plan
    (problem,) = decision_problems(replace(plan, accumulate=2))
    assert "updates in every microbatch" in problem
