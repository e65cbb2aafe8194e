"""Sums in unequal shares: where a plan takes them, how it keeps them, and what its ranks send and get."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.plan import Plan
from splitc.ir.plan_checks import decision_problems
from splitc.ir.short_wire import parse_wire
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from splitc.runtime.transport.collective import PIECE
from splitc.specialise import Settings, specialise
from tests.support.compiled import class_batch, compiled
from tests.support.every_strategy import analysed, images, planned
from tests.support.ranks import assert_same, on_workers, one_process, train
from tests.support.wire_bytes import assert_defined

BATCH = 16
SHARES = (100, 100, 100, 0)


def with_a_slow_line(part: float = 0.25) -> Cluster:
    """Four ranks, the last one on a line with this part of the others' bandwidth."""
    cluster = load_cluster("v100-10gbe")
    link = replace(cluster.link, latency=1e-9, bandwidth=1e6, message_processor=0.0)
    slow = Unlike((3,), cluster.device, link.with_bandwidth(part * 1e6))
    return replace(cluster, link=link, unlike=(slow,))


@cache
def network() -> nn.Module:
    """2.4 MB of weights, most of them in one tensor, which travels in several pieces."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 960), nn.ReLU(), nn.Linear(960, 10))


def batch() -> tuple[Tensor, Tensor]:
    return class_batch((BATCH, 8))


def made(strategy: str = "data_parallel", cluster: Cluster | None = None) -> CompiledProgram:
    images, labels = class_batch((4, 8))
    return compiled(network(), (images,), labels, cross_entropy, 4, strategy, cluster=cluster or with_a_slow_line())


def test_a_plan_takes_them_where_lines_differ_and_keeps_them() -> None:
    plan = made().plan
    assert plan.sum_shares == SHARES and plan.exact
    assert json.loads(plan.to_json())["sum_shares"] == [*SHARES]
    assert Plan.from_json(plan.to_json()) == plan
    equal = made(cluster=replace(with_a_slow_line(), unlike=())).plan
    assert equal.sum_shares == () and "sum_shares" not in json.loads(equal.to_json())
    assert equal.hash != plan.hash
    assert made(cluster=with_a_slow_line(0.97)).plan.sum_shares == ()  # it would gain less than prices err
    assert made("data_parallel(all_reduce=recursive_doubling)").plan.sum_shares == ()


def test_a_plan_that_a_person_wrote_says_what_it_cannot_have() -> None:
    plan = made().plan
    assert decision_problems(replace(plan, sum_shares=(1, 2, 3))) == [
        "sum_shares: it is [1, 2, 3]; it must have a number for each rank of a world of 4"
    ]
    assert "sum_shares" in "".join(decision_problems(replace(plan, sum_shares=(1, 2, 3, -1))))
    (problem,) = decision_problems(replace(plan, all_reduce="recursive_doubling"))
    assert problem == "sum_shares: all_reduce 'recursive_doubling' sums all numbers on every rank: take 'backend'"


def test_the_slow_rank_sends_its_gradients_once_and_the_step_is_priced_so() -> None:
    cluster = with_a_slow_line()
    program, ring = made().program, made(cluster=replace(cluster, unlike=())).program
    seconds = {}
    for each, shares, times in ((program, SHARES, 1.0), (ring, (), 1.5)):
        sums = [op for op in wire(each, 3) if op.payload.what is What.BUCKET]
        nbytes = sum(op.nbytes for op in sums)
        assert {op.shares for op in sums} == {shares}
        assert sum(op.sent for op in sums) == pytest.approx(times * nbytes)
        seconds[shares] = simulate(each, cluster).step_seconds
        for rank, phases in enumerate(simulate(each, cluster).phases):
            assert phases.sent_bytes == pytest.approx(sum(op.sent for op in wire(each, rank)))
    pieces = sum(min(op.nbytes, PIECE) for op in sums)
    assert seconds[()] - seconds[SHARES] == pytest.approx((0.5 * nbytes - pieces) / 0.25e6, rel=0.05)


@pytest.mark.ranks
def test_ranks_send_what_their_wire_says_and_train_as_one_process() -> None:
    program = made()
    assert program.plan.sum_shares == SHARES
    assert_defined(program, batch())
    batches = [batch() for _ in range(2)]
    losses, state = one_process(deepcopy(network()), batches)
    (got, gathered), *_ = on_workers(program, lambda worker: train(worker, batches))
    torch.testing.assert_close(got, losses)
    assert_same(gathered, state)


@pytest.mark.slow
@pytest.mark.ranks
def test_shares_that_a_person_wrote_are_those_of_gradients_alone_in_any_format() -> None:
    for strategy, form in (
        ("modulo_shard(mp=2)", "exact"),
        ("hybrid_single", "gradients=int8"),
        ("layer_separation(n_c=3, n_f=1)", "bf16"),
    ):
        given = planned(4, strategy, global_batch=96)
        plan = replace(given.plan.decided, sum_shares=(5, 0, 1, 2), wire=parse_wire(form))
        program = given.of(specialise(analysed()[1], Settings(4), plan))
        kinds = {op.payload.what for rank in range(4) for op in wire(program.program, rank) if op.shares}
        assert kinds == {What.BUCKET}, strategy
        assert_defined(program, images(96))
