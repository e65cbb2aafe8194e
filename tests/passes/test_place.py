"""Plans: what they cost, what they hold, and what they say of themselves."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.cost_models.simulation.timeline import SAMPLES
from splitc.errors import PlacementError
from splitc.ir.costs import CostLine
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.planner import priced_plan
from splitc.passes.planner.priced_plan import PricedPlan
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.layer_separation import LayerSeparation
from splitc.strategies.single_device import SingleDevice
from tests.support.sampling import sampled
from tests.support.small_programs import Row, candidate, fc_layers, place, separable, small_cluster, small_program

BY_LINK = [(LayerSeparation(), 4), (DataParallel(), 1), (Auto(), 1), (Auto(), 5)]


@pytest.mark.slow
@sampled(("strategy", "batch"), BY_LINK, one_in=4)
def test_no_plan_gets_slower_when_the_link_gets_faster(strategy: Strategy, batch: int) -> None:
    program = separable(batch)
    requests = [Request(program, small_cluster(rate), 5) for rate in (1e3, 1e4, 1e5, 1e6, 1e7, 1e9)]
    plans = [place(program, 5, strategy, request.cluster) for request in requests]
    chosen = [plan.samples_per_second for plan in plans]
    assert chosen[0] > 0 and chosen == sorted(chosen)
    for plan in plans:
        fixed = PricedPlan(plan.strategy, plan)
        rates = [priced_plan.simulated(request, fixed).samples_per_second for request in requests]
        assert rates == sorted(rates)


@cache
def usual() -> Plan:
    """The best plan of four ranks."""
    return place(separable(), 4, Auto())


@pytest.mark.slow
def test_a_slow_link_puts_the_fc_layers_on_one_rank_and_a_fast_one_does_not() -> None:
    slow = place(separable(), 4, Auto(), small_cluster(1e5))
    assert slow.roles == {"trunk": (0, 1, 2), "head": (3,)}
    assert fc_layers(slow) == {"fc1", "fc2", "loss"}
    cluster = small_cluster(1e9, latency=1e-6)
    fast = place(separable(), 4, Auto(), replace(cluster, device=replace(cluster.device, memory_bandwidth=1e9)))
    assert all(len(ranks) == 4 for ranks in fast.roles.values())


@pytest.mark.slow
@pytest.mark.parametrize(("world", "batch", "rate"), [(2, 1, 1e4), (3, 1, 1e5)])
def test_few_readers_take_the_examples_of_the_fastest_plan_where_they_are_faster(
    world: int, batch: int, rate: float
) -> None:
    """Three readers train more samples/s than two with an example each, and fewer than two with three."""
    request, program = Place(small_cluster(rate), world, Auto()), separable(batch)
    by_reader = request.run(program).plan
    chosen = replace(request, fewer_readers=True).run(program).plan
    as_many = replace(request, global_batch=by_reader.global_batch).run(program).plan
    assert chosen.decided == as_many.decided and chosen.samples_per_second > 1.3 * by_reader.samples_per_second
    assert len(chosen.roles["trunk"]) < len(by_reader.roles["trunk"])


def updating(*parameters: int) -> float:
    """Seconds of the optimizer on so many numbers, each read and written eight times at 1 MB/s."""
    return 8 * 4 * sum(parameters) / 1e6


def test_the_price_of_a_separation_is_the_sum_of_its_parts() -> None:
    plan = place(separable(), 3, LayerSeparation(n_c=2, n_f=1), small_cluster(1e6, 0.01), pins={"fc1": "head"})
    assert fc_layers(plan) == {"fc1", "fc2", "loss"}
    compute = 4 * 8e5 / 1e6 + 8 * 3e4 / 1e6 + updating(100, 200)  # of the head under the backward of the trunk
    cut, labels = 8 * 32 * 4 / 1e6 + 2 * 0.01, 8 * 4 / 1e6 + 2 * 0.01
    conv1 = 400 / 1e6 + 2 * 0.01 * 400 / 4e6  # what no backward is left to hide, with its part of a bucket's latency
    assert plan.prediction.program_seconds == pytest.approx(compute + 2 * cut + labels + conv1)
    assert plan.step_seconds > compute


def test_the_price_of_data_parallelism_is_compute_and_the_all_reduce_that_the_backward_does_not_hide() -> None:
    compute, gradient = 4 * 8.3e5 / 1e6, (100 + 200 + 50_000 + 10_000) * 4
    plan = place(separable(), 2, DataParallel(), small_cluster(1e6, 0.01))
    conv1 = 400 / 1e6 + 2 * 0.01 * 400 / 4e6
    assert plan.prediction.program_seconds == pytest.approx(compute + conv1 + updating(100, 200, 50_000, 10_000))
    slow = place(separable(), 2, DataParallel(), small_cluster(1e4, 1.0))
    after_fc2 = 4 * 8.2e5 * 2 / 3 / 1e6
    all_reduce = gradient / 1e4 + 2 * 1.0 * gradient / 4e6
    assert slow.prediction.program_seconds == pytest.approx(
        compute + all_reduce - after_fc2 + updating(100, 200, 50_000, 10_000)
    )
    assert slow.step_seconds > compute + gradient / 1e4 - after_fc2
    assert {p.sync for p in plan.placements.values()} == {"all_reduce", "none"}
    assert plan.placements["loss"].sync == "none"


def test_a_layer_of_one_rank_or_without_trainable_parameters_is_not_summed() -> None:
    rows = [
        Row("frozen", ("images",), parameters=10, width=4, flops=1e5, trains=False),
        Row("conv", ("frozen",), parameters=10, width=4, flops=1e5),
        Row("fc", ("conv",), parameters=9999, width=4, flops=1e2),
        Row("loss", ("fc", "labels")),
    ]
    plan = place(small_program(rows), 3, LayerSeparation(n_f=1), pins={"conv": "conv"})
    sync = {name: placed.sync for name, placed in plan.placements.items()}
    assert sync == {"frozen": "none", "conv": "all_reduce", "fc": "none", "loss": "none"}


def test_no_gradient_comes_back_where_nothing_trains_below_the_cut() -> None:
    def seconds(trains: bool) -> float:
        rows = [
            Row("conv", ("images",), parameters=10, width=1000, flops=1e6, trains=trains),
            Row("fc", ("conv", "labels"), parameters=9999, flops=1e2),
        ]
        options = LayerSeparation(n_c=1, n_f=1)
        return place(small_program(rows), 2, options, small_cluster(1e6, 0.0)).prediction.program_seconds

    assert seconds(True) - seconds(False) == pytest.approx(4 * 1000 * 4 / 1e6 + updating(10))


def test_more_readers_make_a_larger_batch_and_a_fixed_one_is_shared_out() -> None:
    grown = place(separable(batch=4), 5, LayerSeparation(n_c=3))
    assert (grown.global_batch, grown.local_batches) == (12, (4, 4, 4))
    fixed = place(separable(batch=4), 5, LayerSeparation(n_c=3), global_batch=10)
    assert fixed.batch_offsets == {"trunk": (0, 4, 7, 10), "head": (0, 7, 10)}


def test_the_largest_share_sets_the_pace() -> None:
    cluster = small_cluster(1e12, 0.0)
    uneven = place(separable(), 3, DataParallel(), cluster, global_batch=7)
    even = place(separable(), 3, DataParallel(), cluster, global_batch=9)
    assert uneven.local_batches == (3, 2, 2)
    assert uneven.step_seconds == pytest.approx(even.step_seconds)


def test_single_device_uses_rank_0_only_and_keeps_the_world() -> None:
    plan = place(separable(), 4, SingleDevice())
    assert plan.world == 4
    assert plan.roles == {"all": (0,)}
    assert plan.batch_offsets == {"all": (0, 4)}
    assert plan.prediction.program_seconds == pytest.approx(4 * 8.3e5 / 1e6 + updating(100, 200, 50_000, 10_000))


def test_a_world_of_one_runs_on_one_device() -> None:
    plan = place(separable(), 1, Auto())
    assert plan.strategy == "single_device"
    assert candidate(plan, "data_parallel").step_seconds == plan.step_seconds
    assert not candidate(plan, "layer_separation").feasible


@pytest.mark.slow
def test_the_plan_shows_the_best_of_every_family() -> None:
    plan = usual()
    assert [c.strategy for c in plan.candidates] == [
        "single_device",
        "data_parallel",
        "parameter_server",
        "layer_separation",
        "hybrid_single",
        "modulo_shard",
        "late_multiply",
        "mixed",
    ]
    assert all(c.exact for c in plan.candidates)
    assert all(c.feasible and not c.why for c in plan.candidates[:5])
    for strategy in ("modulo_shard", "late_multiply"):
        assert "no linear layer" in candidate(plan, strategy).why
    assert candidate(plan, plan.strategy).step_seconds == plan.step_seconds
    assert candidate(plan, "layer_separation").roles.keys() == {"trunk", "head"}


@pytest.mark.slow
def test_a_strategy_asked_for_by_name_prices_the_others_when_its_candidates_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced: list[str] = []
    real = Place._proposed

    def counting(self: Place, request: Request, name: str) -> Any:
        priced.append(name)
        return real(self, request, name)

    monkeypatch.setattr(Place, "_proposed", counting)
    plan = place(separable(), 4, DataParallel())
    assert json.loads(plan.to_json())["candidates"][0]["strategy"] == "data_parallel"
    assert plan.hash and priced == ["data_parallel"]
    names = [each.strategy for each in plan.candidates]
    assert len(names) == 8 and priced == ["data_parallel", *names]
    assert len(plan.candidates) == 8 and len(priced) == 9
    assert len(usual().prediction.priced) == 8


@pytest.mark.slow
def test_a_layer_is_priced_once_for_each_batch_and_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[tuple[int, int]] = []
    real = CostLine.at

    def counting(self: CostLine, batch: int) -> Any:
        at.append((id(self), batch))
        return real(self, batch)

    monkeypatch.setattr(CostLine, "at", counting)
    found = SimpleNamespace(step_seconds=1.0, p90=1.0)
    monkeypatch.setattr(priced_plan, "simulate", lambda *_, samples=0: found)  # it prices by itself
    plan = place(separable(), 4, Auto())
    assert len(plan.prediction.reasons) == len(plan.placements)
    assert max(Counter(at).values()) <= 4  # on 1, 2, 3 and 4 computing ranks


@pytest.mark.slow
def test_what_does_not_fit_is_priced_and_says_what_is_short() -> None:
    plan = place(separable(), 4, Auto(), memory=800_000)
    failed = candidate(plan, "data_parallel")
    assert not failed.feasible
    assert failed.program_seconds > 0
    assert "each rank of role all (ranks 0 to 3)" in failed.why
    assert "needs 968 kB of memory and has 800 kB" in failed.why


def test_when_nothing_fits_role_need_and_have_are_told() -> None:
    with pytest.raises(PlacementError) as error:
        place(separable(), 4, LayerSeparation(n_f=1), memory=300_000)
    message = str(error.value)
    assert "role head (rank 3) needs 727 kB of memory and has 300 kB" in message
    assert "its largest layer, fc1, needs 603 kB" in message


@pytest.mark.slow
def test_when_no_strategy_fits_each_says_why() -> None:
    with pytest.raises(PlacementError) as error:
        place(separable(), 4, Auto(), memory=1000)
    message = str(error.value)
    assert all(f"{name}: " in message for name in ("data_parallel", "layer_separation"))
    assert message.count("has 1.00 kB") >= 3


def test_more_copies_in_the_optimizer_need_more_memory() -> None:
    program, memory = separable(), 241_200 * 3 + 10_000
    assert place(program, 1, SingleDevice(), memory=memory, optimizer_copies=1)
    with pytest.raises(PlacementError, match="needs"):
        place(program, 1, SingleDevice(), memory=memory, optimizer_copies=2)


def test_ranks_that_share_a_device_compute_and_hold_a_part_of_it() -> None:
    shared = small_cluster(1e12, 0.0, ranks_share_device=True)
    alone = place(separable(), 1, SingleDevice(), shared)
    four = place(separable(), 4, DataParallel(), shared)
    assert four.prediction.program_seconds == pytest.approx(4 * alone.prediction.program_seconds, rel=1e-3)
    assert four.step_seconds > 4 * alone.step_seconds * (1 - 1e-3)


def test_a_cluster_with_fewer_devices_than_ranks_is_refused() -> None:
    with pytest.raises(PlacementError, match="8 ranks were asked for, but cluster toy has 2"):
        place(separable(), 8, Auto(), small_cluster(world=2))


def test_every_layer_has_a_reason_with_numbers() -> None:
    plan = place(separable(), 4, cluster=small_cluster(1.25e4))
    assert plan.prediction.reasons.keys() == plan.placements.keys()
    assert plan.prediction.reasons["fc1"].startswith("holds 50.0 k parameters and is 2.4 % of the computing")
    assert "its gradient would cost 24 s" in plan.prediction.reasons["fc1"]
    assert "on 100 kbit/s, its input costs" in plan.prediction.reasons["fc1"]
    assert "trunk ranks" in plan.prediction.reasons["conv1"]
    assert "its gradient costs" in place(separable(), 4, DataParallel()).prediction.reasons["fc1"]
    assert "nothing is sent" in place(separable(), 4, SingleDevice()).prediction.reasons["fc1"]


@pytest.mark.slow
def test_twenty_layers_on_eighty_ranks_take_a_few_seconds() -> None:
    rows = [Row("layer0", ("images",), parameters=100, width=500, flops=1e5)]
    for i in range(1, 20):
        rows.append(
            Row(
                f"layer{i}",
                tuple(f"layer{j}" for j in range(max(0, i - 2), i)),
                parameters=100 * i * i,
                width=500 - 20 * i,
                flops=1e6 / i,
            )
        )
    rows.append(Row("loss", ("layer19", "labels")))
    begin = sum(os.times()[:4])
    plan = place(small_program(rows), 80, Auto())
    named = place(small_program(rows), 80, LayerSeparation())
    assert sum(os.times()[:4]) - begin < 10, "seconds of this process and its solvers, whatever else runs"
    assert "heuristic" not in (plan.prediction.proof, named.prediction.proof)
    assert plan.prediction.gap < 0.1, "of the plan that the simulation prefers"


@pytest.mark.slow
def test_a_plan_that_does_not_fit_to_the_byte_makes_room_for_the_next() -> None:
    free = usual()
    asked: list[Plan] = []

    def fits(program: Program, plan: Plan) -> bool:
        asked.append(plan)
        return plan.placements != free.placements or plan.roles != free.roles

    other = place(separable(), 4, Auto(), fits=fits)
    assert len(asked) > 1 and (other.placements, other.roles) != (free.placements, free.roles)
    assert other.samples_per_second <= free.samples_per_second
    nothing = place(separable(), 4, LayerSeparation(), fits=lambda program, plan: False)
    assert nothing.strategy == "layer_separation", "refused with its bytes when it is compiled"


@pytest.mark.slow
def test_auto_tries_the_microbatches_that_are_asked_for_alone() -> None:
    for number in (1, 2):
        plan = place(separable(batch=8), 4, Auto(microbatches=number))
        several = {each.microbatches for each in plan.candidates if each.feasible}
        assert plan.microbatches in (1, number) and number in several <= {1, number}


def test_a_reason_names_the_next_best_placement_of_a_large_layer_and_its_price() -> None:
    reasons = place(separable(), 4, LayerSeparation(n_f=1), small_cluster(1e5)).prediction.reasons
    assert re.search(r"; whole in trunk, the step would take [0-9.]+ k?s more$", reasons["fc1"])
    assert "the step would take" not in reasons["conv1"], "which is small"


@sampled("strategy", [LayerSeparation(), Auto()], one_in=2)
def test_a_plan_comes_back_when_the_time_is_over_at_once(strategy: Strategy) -> None:
    plan = place(separable(), 4, strategy, time_limit=1e-6)
    free = place(separable(), 4, strategy)
    assert plan.placements.keys() == free.placements.keys()
    assert plan.step_seconds > 0 and 0 <= plan.prediction.gap < 1
    bound = plan.global_batch / plan.prediction.program_seconds / (1 - plan.prediction.gap)
    assert free.global_batch / free.prediction.program_seconds <= bound * (1 + 1e-6)


@pytest.mark.slow
def test_a_plan_of_too_many_transfers_is_simulated_only_where_no_other_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = place(separable(), 30, Auto())
    monkeypatch.setattr("splitc.passes.place._TRANSFERS", 0)
    limits: list[float] = []
    real = priced_plan.simulated

    def noted(request: Request, priced: Any, most: float = 0.0) -> Any:
        limits.append(most)
        return real(request, priced, most)

    monkeypatch.setattr("splitc.passes.place.simulated", noted)
    plan = place(separable(), 30, Auto())
    assert {0, float("inf")} <= set(limits)
    assert plan.samples_per_second == pytest.approx(free.samples_per_second)


def test_of_plans_that_are_near_the_one_whose_slow_steps_are_the_fastest_is_taken() -> None:
    plan = Plan("a", 2, {"all": (0, 1)}, {}, {"all": (0, 2, 4)})
    steady = [PricedPlan("a", plan, 1.0), PricedPlan("b", plan, 1.03), PricedPlan("c", plan, 1.2)]
    assert priced_plan.fastest(steady).strategy == "a"
    varying = [replace(each, p90=p90) for each, p90 in zip(steady, (1.3, 1.1, 1.0), strict=True)]
    assert priced_plan.fastest(varying).strategy == "b"


@pytest.mark.slow
def test_where_computing_varies_a_plan_is_chosen_by_the_expected_wait() -> None:
    usual_cluster = small_cluster(1e6)
    varying = replace(usual_cluster, device=replace(usual_cluster.device, jitter=1e-3))
    steady, found = (place(separable(), 4, Auto(), each) for each in (usual_cluster, varying))
    assert found.step_seconds > 0 and found == place(separable(), 4, Auto(), varying)
    assert found.samples_per_second < steady.samples_per_second
    request = Request(separable(), varying, 4)
    sampled = priced_plan.simulated(request, PricedPlan(found.strategy, found), samples=SAMPLES)
    assert sampled.seconds == found.step_seconds and sampled.p90 > 0
