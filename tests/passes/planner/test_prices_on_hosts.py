"""Prices of plans where ranks have hosts, links of unequal speed, or a link that a host's ranks share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from splitc.cost_models.network.alpha_beta import recursive_doubling, ring_all_reduce
from splitc.cost_models.simulation.timeline import simulate
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Link, Rate
from splitc.ir.program import LoweredProgram
from splitc.passes.planner.divisions import Role
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.propose import propose
from splitc.passes.planner.reasons import explain
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.hybrid_single import HybridSingle
from splitc.strategies.late_multiply import LateMultiply
from splitc.strategies.layer_separation import LayerSeparation
from splitc.strategies.modulo_shard import ModuloShard
from splitc.strategies.parameter_server import ParameterServer
from tests.support.every_strategy import analysed, planned
from tests.support.sampling import sampled
from tests.support.small_programs import place, separable, small_cluster

SEPARATE = LayerSeparation(n_c=2, n_f=2)
ENDLESS = Link(1e18, 0.0)
PINS = {"conv*": "conv", "fc*": "fc"}
STRATEGIES = [
    "data_parallel", "data_parallel(all_reduce=recursive_doubling)", "hybrid_single", "late_multiply",
    "modulo_shard(mp=2)", "layer_separation(n_c=2, n_f=2)", "parameter_server(servers=2)",
    "parameter_server(beside=True)",
]  # fmt: skip
FAMILIES = [DataParallel(), SEPARATE, HybridSingle(), ParameterServer(servers=2), LayerSeparation(ranks="2+1+1")]


def hosts(bandwidth: float, ranks: int = 2, inside: Link = ENDLESS, shared: bool = False, **others: Any) -> Cluster:
    """Hosts of so many ranks, with links between them that have no latency."""
    link = Link(bandwidth, 0.0, shared=shared)
    return replace(small_cluster(), link=link, local_link=inside, ranks_per_host=ranks, **others)


def seconds(cluster: Cluster, strategy: Strategy = SEPARATE) -> float:
    """A step of four ranks; a separation at the one cut that is pinned."""
    pins = PINS if strategy is SEPARATE else {}
    return place(separable(), 4, strategy, cluster, pins=pins).step_seconds


def unhidden(cluster: Cluster, strategy: Strategy = SEPARATE) -> float:
    """The same by the closed form, where no sync hides under backward."""
    program = separable()
    pins = resolve_pins(PINS if strategy is SEPARATE else {}, [layer.name for layer in program.layers])
    found = propose(Request(program, cluster, 4, pins), strategy)[0].found
    assert found is not None
    return replace(found.problem, overlap=False).seconds(found.chosen)


def served(cluster: Cluster, servers: int) -> float:
    """The same of parameter servers, by their closed form."""
    plan = place(separable(), 4, ParameterServer(servers=servers), cluster)
    return plan.prediction.program_seconds


@cache
def program_of(strategy: str) -> LoweredProgram:
    """What four ranks run, planned elsewhere."""
    return planned(4, strategy).program


def wired(strategy: str, cluster: Cluster) -> float:
    """A simulated step of a program on a cluster."""
    return simulate(program_of(strategy), cluster).step_seconds


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", FAMILIES, ids=str)
def test_a_plan_is_priced_on_the_links_that_it_uses(strategy: Strategy) -> None:
    inside, usual = Link(3e5, 2e-4), small_cluster()
    assert seconds(hosts(1.0, 4, inside), strategy) == seconds(hosts(1.0, 8, inside), strategy)
    alone = seconds(replace(usual, link=inside), strategy)
    assert seconds(hosts(1.0, 4, inside), strategy) == pytest.approx(alone, rel=1e-12), "all ranks fit one host"
    times = [seconds(hosts(bandwidth), strategy) for bandwidth in (1e12, 1e6, 1e4)]
    assert times == sorted(times) and times[0] < times[-1], "of several hosts"
    slow, outside = (replace(usual, unlike=(Unlike((rank,), usual.device, Link(1e4, 1e-4)),)) for rank in (3, 4))
    assert seconds(slow, strategy) > seconds(usual, strategy) == seconds(outside, strategy)


def test_an_all_reduce_over_hosts_has_their_adapters_together_or_the_one_they_share() -> None:
    none = unhidden(hosts(1e18), DataParallel())
    exchange = unhidden(replace(small_cluster(), link=Link(1e5, 0.0)), DataParallel()) - none
    assert unhidden(hosts(1e5), DataParallel()) - none == pytest.approx(exchange / 2)
    assert unhidden(hosts(1e5, shared=True), DataParallel()) - none == pytest.approx(exchange)


def test_a_separation_of_hosts_sums_inside_them_and_exchanges_between_them() -> None:
    """Two conv ranks on one host, two fc ranks on the other: a link that the ranks share carries both cuts."""
    none, own, shared = unhidden(hosts(1e18)), unhidden(hosts(1e5)), unhidden(hosts(1e5, shared=True))
    cut = 2 * (32 * 4 * 4) / 1e5  # there and back: 32 numbers of 4 bytes for the 4 examples of a rank
    labels = 4 * 4 / 1e5
    assert own - none == pytest.approx(cut + labels)
    assert shared - none == pytest.approx(2 * (cut + labels))
    inside = hosts(1e18, inside=Link(1e5, 0.0))
    conv, fc = (100 + 200) * 4, (50_000 + 10_000) * 4
    assert unhidden(inside) - none == pytest.approx((conv + fc) / 1e5)  # rings of two: all of it once


def test_servers_of_a_host_share_its_link() -> None:
    """Equation (6): 2 n_w P / (n_s B), with half of B for each of two servers."""
    none = served(hosts(1e18), 2)
    exchange = 2 * 2 * 60_300 * 4 / (2 * 1e5)
    assert served(hosts(1e5), 2) - none == pytest.approx(exchange)
    assert served(hosts(1e5, shared=True), 2) - none == pytest.approx(2 * exchange)


def test_more_servers_than_workers_do_not_make_a_workers_link_faster() -> None:
    """All parameters come and all gradients go over it, however many servers there are."""
    plain = replace(small_cluster(), link=Link(1e5, 0.0))
    none = served(replace(plain, link=ENDLESS), 3)
    assert served(plain, 3) - none == pytest.approx(2 * 60_300 * 4 / 1e5)


def test_recursive_doubling_sends_from_every_rank_at_once() -> None:
    """Rings leave a host once; the ranks that double each send all bytes to another host."""
    program = separable()
    nbytes = 1e6
    rings = Request(program, hosts(1e5, shared=True), 4)
    doubling = replace(rings, all_reduce="recursive_doubling")
    assert rings.all_reduce_seconds(nbytes, range(4)) == ring_all_reduce(nbytes, 4, Link(1e5, 0.0))
    assert doubling.all_reduce_seconds(nbytes, range(4)) == recursive_doubling(nbytes, 4, Link(0.5e5, 0.0))
    assert doubling.all_reduce_seconds(nbytes, range(2)) == recursive_doubling(nbytes, 2, ENDLESS)


def test_groups_and_replicas_are_priced_where_they_run() -> None:
    request = Request(separable(), hosts(1e5, 4, Link(1e7, 0.0), shared=True), 8)
    fours = Role(tuple(range(8)), request.bounds(8), 4)
    assert fours.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert fours.replicas == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert request.all_gather_seconds(1e6, *fours.groups) == pytest.approx(0.75 * 1e6 / 1e7)
    assert request.all_reduce_seconds(1e6, *fours.replicas) == pytest.approx(1e6 / (1e5 / 4))
    assert request.all_gather_seconds(1e6, range(8)) == pytest.approx(7 / 8 * 1e6 / 1e5)


def test_reasons_name_the_link_that_sums_a_gradient() -> None:
    def why(cluster: Cluster) -> str:
        program = separable()
        request = Request(program, cluster, 4)
        return explain(request, propose(request, SEPARATE)[0])["conv1"]

    assert "on 1.00 Mbit/s" in why(hosts(1e2, inside=Link(1.25e5, 0.0)))
    assert "on 800 bit/s" in why(replace(small_cluster(), link=Link(1e2, 0.0)))


# -- what programs put on the wire -------------------------------------------------------------------------------------


@sampled("strategy", STRATEGIES, one_in=3)
def test_what_a_program_sends_is_priced_on_the_links_that_it_uses(strategy: str) -> None:
    """All ranks of a host are looked at, but only the first and the last of those that are hosts of their own."""
    inside, usual = Link(3e5, 2e-4), small_cluster(bandwidth=1e5)
    alone = wired(strategy, replace(small_cluster(), link=inside))
    assert alone * (1 - 1e-9) <= wired(strategy, hosts(1.0, 4, inside)) <= 1.2 * alone
    times = [wired(strategy, hosts(bandwidth)) for bandwidth in (1e12, 1e6, 1e4)]
    assert times == sorted(times)
    shared = wired(strategy, hosts(1e4, shared=True))
    assert shared >= times[-1] * (1 - 1e-9) and shared > times[0]
    slow = replace(usual, unlike=(Unlike((1,), usual.device, Link(1e3, 1e-4)),))
    assert wired(strategy, slow) > wired(strategy, usual)


@pytest.mark.parametrize("strategy", ["modulo_shard(mp=2)", "layer_separation(n_c=2, n_f=2)"])
def test_replicas_of_groups_and_messages_of_all_ranks_divide_the_link_that_they_share(strategy: str) -> None:
    """Groups of two, each on a host: both parts of a gradient are summed between the hosts at once."""
    none, own, shared = (
        wired(strategy, hosts(bandwidth, shared=shared))
        for bandwidth, shared in ((1e18, False), (1e3, False), (1e3, True))
    )
    assert shared - none == pytest.approx(2 * (own - none), rel=0.05)


def test_a_measured_collective_is_priced_as_measured() -> None:
    plain = small_cluster(1e2, 0.0)
    half = {name: Rate(0.5e2, 0.0) for name in ("all_reduce", "all_gather", "reduce_scatter")}
    measured = replace(plain, link=replace(plain.link, collectives=half))
    for strategy in ("modulo_shard(mp=2)", "late_multiply"):
        none = wired(strategy, small_cluster(1e18, 0.0))
        apart = wired(strategy, plain) - none
        assert wired(strategy, measured) - none == pytest.approx(2 * apart, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ModuloShard(mp=2), LateMultiply()], ids=str)
def test_plans_for_linear_layers_cost_less_with_a_fast_link_inside_hosts_and_more_than_on_that_alone(
    strategy: Strategy,
) -> None:
    known = analysed()[1]
    near = place(known, 4, strategy, hosts(1e4, 2, Link(1e7, 1e-6)))
    assert near.step_seconds < place(known, 4, strategy, small_cluster(1e4)).step_seconds
    assert near.step_seconds > place(known, 4, strategy, small_cluster(1e7, 1e-6)).step_seconds
