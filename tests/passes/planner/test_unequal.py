"""Unequal clusters: the ranks of each role, their shares of the examples, and their memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Link
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.divisions import Division, busiest
from splitc.passes.planner.options import make_problem
from splitc.passes.planner.priced_plan import PricedPlan, simulated
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.strategy import Strategy
from splitc.passes.planner.unequal import search_unequal, variants
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.hybrid_single import HybridSingle
from splitc.strategies.layer_separation import LayerSeparation
from splitc.strategies.mixed import Mixed
from splitc.strategies.modulo_shard import ModuloShard
from splitc.strategies.single_device import SingleDevice
from tests.passes.planner.test_search import random_program, request_of, three_linear_layers
from tests.support.compiled import compiled
from tests.support.ranks import Net, batch_of
from tests.support.sampling import sampled
from tests.support.small_problems import least_step
from tests.support.small_programs import place, separable, small_cluster


def with_unlike(cluster: Cluster, ranks: tuple[int, ...], speed: float = 1.0, memory: float = 1.0) -> Cluster:
    """The cluster with `ranks` whose devices have so many times the speed and the memory of the others."""
    device = cluster.device.scaled(speed)
    return replace(cluster, unlike=(Unlike(ranks, replace(device, memory=device.memory * memory), cluster.link),))


WIRE = 1e9
"""Bandwidth at which transfers take next to nothing (bytes/s)."""


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_a_fast_and_a_slow_device_share_a_batch_by_their_speeds() -> None:
    cluster = with_unlike(small_cluster(WIRE, 1e-9), (1,), speed=3.0)
    plan = place(separable(), 2, DataParallel(), cluster, global_batch=80)
    assert plan.local_batches == (20, 60)
    equal = place(separable(), 2, DataParallel(), small_cluster(WIRE, 1e-9), global_batch=80)
    assert plan.samples_per_second > 1.8 * equal.samples_per_second  # twice, but for the optimizer


@pytest.mark.slow
@pytest.mark.parametrize("fast", [1, 3])
def test_work_and_large_layers_go_where_they_are_fastest_and_fit(fast: int) -> None:
    """The convolutions of `separable` have nearly all there is to compute."""
    plan = place(separable(), 4, SingleDevice(), with_unlike(small_cluster(), (fast,), speed=2.0))
    assert plan.roles == {"all": (fast,)}
    plan = place(separable(), 4, LayerSeparation(n_f=3), with_unlike(small_cluster(1e6), (fast,), speed=8.0))
    assert plan.roles["trunk"] == (fast,)
    assert plan.roles["head"] == tuple(rank for rank in range(4) if rank != fast)
    cluster = with_unlike(small_cluster(memory=1e5), (fast,), memory=10.0)
    plan = place(separable(), 4, Auto() if fast == 1 else LayerSeparation(), cluster)
    assert {rank for layer in ("fc1", "fc2") for rank in plan.roles[plan.placements[layer].role]} == {fast}


def test_what_no_device_has_memory_for_names_the_ranks_that_are_short_and_what_they_have() -> None:
    cluster = with_unlike(small_cluster(memory=1e5), (0, 2), memory=0.1)
    with pytest.raises(PlacementError, match=r"role all \(ranks 0 2\) needs \S+ kB of memory and has 10.0 kB"):
        place(separable(), 4, DataParallel(), cluster)


@pytest.mark.slow
def test_groups_stay_inside_hosts() -> None:
    cluster = small_cluster(1e5, local_link=Link(1e9, 1e-9), ranks_per_host=4)
    for few in ((), (0, 1, 2, 3), (2, 5)):
        plan = place(three_linear_layers(), 8, ModuloShard(mp=4), with_unlike(cluster, few, 2.0) if few else cluster)
        (role,) = plan.groups
        assert all(len({*map(cluster.host_of, plan.group(role, rank))}) == 1 for rank in plan.roles[role])


def test_equal_clusters_have_no_variants() -> None:
    request = request_of(separable(), 4, small_cluster())
    assert not [each for division in Mixed().divisions(request) for each in variants(request, division)]


def test_variants_keep_the_global_batch_and_differ_in_more_than_names() -> None:
    request = request_of(separable(8), 8, with_unlike(small_cluster(), (2, 3, 6), speed=2.0, memory=0.5))
    for division in Mixed().divisions(request):
        found = list(variants(request, division))
        assert len(set(found)) == len(found) and division not in found
        for each in found:
            assert each.global_batch == division.global_batch
            assert all(role.bounds[-1] == each.global_batch and smallest(role.bounds) >= 1 for role in each.roles)
            assert [len(role.ranks) for role in each.roles] == [len(role.ranks) for role in division.roles]
            assert all(list(role.ranks) == sorted(set(role.ranks)) for role in each.roles)


# -- brute force -------------------------------------------------------------------------------------------------------


def unequal_case(seed: int) -> Request:
    """Three ranks or two of two kinds, often with too little memory on some of them."""
    rng = random.Random(seed)
    program, world = random_program(rng), rng.randint(2, 3)
    few = tuple(sorted(rng.sample(range(world), rng.randint(1, world - 1))))
    memory = rng.choice([1e9, 10 ** rng.uniform(3.5, 5.5)])
    cluster = small_cluster(10 ** rng.uniform(4, 8), 10 ** rng.uniform(-7, -3), memory)
    cluster = with_unlike(cluster, few, rng.choice([1.0, 2.0, 7.0]), rng.choice([0.3, 1.0, 4.0]))
    return replace(request_of(program, world, cluster, global_batch=rng.randint(3, 20)), memory=None)


def layouts(request: Request, division: Division) -> Iterator[Division]:
    """Every way to name the ranks of a division, each with equal shares and with those of its variants."""
    world = range(request.world)
    for order in itertools.permutations(world):
        ranks = [tuple(sorted(order[rank] for rank in role.ranks)) for role in division.roles]
        roles = (replace(role, ranks=each) for role, each in zip(division.roles, ranks, strict=True))
        yield replace(division, roles=tuple(roles))
    yield from variants(request, division)


@pytest.mark.slow
@sampled("seed", range(12), one_in=6)
def test_the_search_finds_the_best_of_all_ranks_shares_and_assignments(seed: int) -> None:
    request = unequal_case(seed)
    rules = cut_rules(request.program)
    for strategy in (DataParallel(), HybridSingle(), LayerSeparation(), SingleDevice()):
        space = strategy.space(request, False)
        divided = [each for each in strategy.divisions(request) if all(smallest(r.bounds) for r in each.roles)]
        best = 0.0
        for division in divided:
            for each in dict.fromkeys(layouts(request, division)):
                best = max(best, each.global_batch / least_step(make_problem(request, rules, each, space)))
        found = search_unequal(request, rules, divided, space)
        assert (found.found[0].rate if found.found else 0.0) == pytest.approx(best, rel=1e-6), strategy
        assert found.bound >= best * (1 - 1e-6)


def equal_treatment(request: Request, strategy: Strategy) -> float:
    """The simulated rate of the plan for a cluster on which all ranks are as slow and small as any."""
    cluster, world = request.cluster, request.world
    alike = replace(cluster, unlike=(), device=cluster.device_for(world), link=cluster.link_over(range(world)))
    try:
        plan = place(request.program, world, strategy, alike, global_batch=request.global_batch)
    except PlacementError:
        return 0.0
    return simulated(request, PricedPlan(plan.strategy, plan)).samples_per_second


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 40, 5))
def test_no_plan_for_equal_devices_is_faster(seed: int) -> None:
    request = unequal_case(seed)
    least = equal_treatment(request, Auto())
    if least:
        plan = place(request.program, request.world, Auto(), request.cluster, global_batch=request.global_batch)
        assert plan.samples_per_second >= least * (1 - 1e-9)


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_a_role_is_as_slow_and_as_small_as_its_own_ranks() -> None:
    cluster = with_unlike(small_cluster(), (0,), speed=4.0, memory=0.25)
    request = replace(request_of(separable(), 4, cluster), memory=None)
    (division,) = [each for each in LayerSeparation(n_f=1).divisions(request) if len(each.roles) == 2]
    conv, fc = (busiest(request, role, 4) for role in division.roles)
    assert {each.device.flop_rate["float32"] for each in conv} == {1e6, 4e6}
    assert {each.scale for each in conv} == {0.25, 1.0}
    assert [each.device.flop_rate["float32"] for each in fc] == [1e6]


# -- the same training -------------------------------------------------------------------------------------------------


def trained(strategy: str, fast: int) -> CompiledProgram:
    """A net on four ranks of which one computes five times as fast, on links that cost nothing."""
    torch.manual_seed(1)
    images, labels = batch_of(8)
    link = Link(1e12, 1e-12)
    device = small_cluster().device
    device = replace(device, flop_rate={"float32": 1e9, "float64": 1e9}, memory_bandwidth=1e9)
    cluster = Cluster("toy", device, link, 4, unlike=(Unlike((fast,), device.scaled(5), link),))
    model = Net(norm=False)
    return compiled(model, (images,), labels, F.cross_entropy, 4, strategy, cluster=cluster, global_batch=32)


LAYOUTS: Mapping[str, int] = {
    "data_parallel": 1, "late_multiply": 0, "modulo_shard(mp=2)": 1, "layer_separation(n_f=2)": 2,
    "layer_separation(n_f=1, microbatches=2)": 0, "hybrid_single": 3,
}  # fmt: skip


@sampled(("strategy", "fast"), LAYOUTS.items(), [("hybrid_single", 3)])
def test_unequal_shares_on_any_ranks_are_the_same_training(strategy: str, fast: int) -> None:
    program = trained(strategy, fast)
    assert len(set(program.plan.local_batches)) > 1 or len(program.plan.roles[program.plan.reader]) < 4
    result = program.verify(steps=2, dtype=torch.float64)
    assert result.holds, str(result)


@pytest.mark.slow
@pytest.mark.processes
def test_processes_with_unequal_shares_on_ranks_out_of_order_are_the_same_training() -> None:
    program = trained("layer_separation(n_f=1)", 2)
    result = program.verify(steps=2, processes=True)
    assert result.holds and result.processes, str(result)
