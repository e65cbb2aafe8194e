"""Latency plus bytes over bandwidth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from splitc.cost_models.clusters.files import known_clusters
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.network.alpha_beta import (
    all_gather,
    all_to_all,
    concurrent,
    many_to_one,
    one_to_many,
    point_to_point,
    recursive_doubling,
    recursive_doubling_rounds,
    reduce_scatter,
    ring_all_reduce,
    through_server,
)
from splitc.ir.cluster import Cluster
from splitc.ir.device import Link, Rate
from tests.support.random_clusters import random_cluster
from tests.support.sampling import sampled

LINK = Link(bandwidth=1e9, latency=1e-3)
HALF_DUPLEX = Link(bandwidth=1e9, latency=1e-3, duplex=False)
Collective = Callable[[float, int, Link], float]
COLLECTIVES: tuple[Collective, ...] = (ring_all_reduce, reduce_scatter, all_gather, recursive_doubling)
CLUSTERS = [load_cluster(name) for name in known_clusters()] + [random_cluster(seed) for seed in range(9)]


def test_a_collective_grows_with_its_bytes_and_costs_one_rank_nothing() -> None:
    for collective in COLLECTIVES:
        assert collective(1e9, 1, LINK) == 0.0
        for n in range(2, 20):
            costs = [collective(nbytes, n, LINK) for nbytes in (0, 1, 1e3, 1e6, 1e9)]
            assert costs == sorted(costs) and costs[0] > 0


def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    assert ring_all_reduce(1e9, 4, LINK) == pytest.approx(2 * 3 / 4 + 6 * 1e-3)
    for n in range(1, 20):
        parts = reduce_scatter(1e6, n, LINK) + all_gather(1e6, n, LINK)
        assert ring_all_reduce(1e6, n, LINK) == pytest.approx(parts)


def test_messages_take_their_latency_and_their_bytes_and_many_to_one_share_a_link() -> None:
    assert point_to_point(1e9, LINK) == pytest.approx(1.001)
    assert many_to_one(1e9, 5, LINK) == pytest.approx(5 + 5e-3)
    assert one_to_many(1e9, 5, LINK) == many_to_one(1e9, 5, LINK)


def test_an_all_to_all_sends_each_rank_its_part_of_a_part_and_a_server_all_of_each_there_and_back() -> None:
    assert all_to_all(16e9, 4, LINK) == pytest.approx(3 * 1.001)
    assert through_server(1e9, 4, LINK) == pytest.approx(2 * (3 + 1e-3))


def test_recursive_doubling_takes_floor_log2_rounds_and_two_for_surplus_ranks() -> None:
    for n, rounds in {1: 0, 2: 1, 3: 3, 4: 2, 5: 4, 7: 4, 8: 3, 10: 5, 80: 8}.items():
        assert recursive_doubling_rounds(n) == rounds
        assert recursive_doubling(1e9, n, LINK) == pytest.approx(rounds * 1.001)


def test_a_link_that_is_not_duplex_takes_twice_as_long_where_both_directions_are_used() -> None:
    assert ring_all_reduce(1e9, 2, HALF_DUPLEX) == pytest.approx(2 * 1.001)
    assert ring_all_reduce(1e9, 2, LINK) == pytest.approx(1.002)
    assert point_to_point(1e9, HALF_DUPLEX) == point_to_point(1e9, LINK)


def test_what_a_backend_was_measured_at_is_what_its_rounds_take() -> None:
    rates = {"all_reduce": Rate(5e8, 2e-3), "all_gather": Rate(4e8, 3e-3), "reduce_scatter": Rate(2e8, 4e-3)}
    measured = replace(HALF_DUPLEX, collectives=rates)
    assert ring_all_reduce(1e9, 4, measured) == pytest.approx(6 * (2e-3 + 0.25e9 / 5e8))
    assert all_gather(1e9, 4, measured) == pytest.approx(3 * (3e-3 + 0.25e9 / 4e8))
    assert reduce_scatter(1e9, 4, measured) == pytest.approx(3 * (4e-3 + 0.25e9 / 2e8))
    for plain in (point_to_point(1e9, measured), recursive_doubling(1e9, 4, measured)):
        assert plain in (point_to_point(1e9, HALF_DUPLEX), recursive_doubling(1e9, 4, HALF_DUPLEX))


# -- what shares a link -----------------------------------------------------------------------------------------------


def test_messages_that_share_a_link_end_together_when_it_is_shared_fairly() -> None:
    """Brute force: of what is under way each gets an equal part, until the smallest has arrived."""
    assert concurrent([], LINK) == 0.0
    for seed in range(20):
        drawn = random.Random(seed)
        sizes = [Fraction(drawn.randint(1, 1000)) for _ in range(drawn.randint(1, 8))]
        left, now = list(sizes), Fraction(0)
        while any(left):
            under_way = [k for k, nbytes in enumerate(left) if nbytes]
            step = min(left[k] for k in under_way)
            now += step * len(under_way)  # of one byte a second
            left = [nbytes - step if k in under_way else nbytes for k, nbytes in enumerate(left)]
        link = Link(bandwidth=1.0, latency=0.5)
        assert concurrent(map(float, sizes), link) == pytest.approx(0.5 + float(now))
        assert concurrent([float(sizes[0])], link) == point_to_point(float(sizes[0]), link)


# -- every closed form on every cluster --------------------------------------------------------------------------------


def prices(cluster: Cluster, nbytes: float) -> list[float]:
    """Every closed form on every kind of link of a cluster."""
    found = []
    for n in (1, 2, 3, 8, 12):
        groups = [range(k, 12, 4) for k in range(4)]
        links = (
            cluster.link_over(range(n)), cluster.link_over(*groups), cluster.link_over(range(12), rings=False),
            cluster.link_across(range(9), range(9, 12)), cluster.link_over((0, 11)),
        )  # fmt: skip
        for link in links:
            found += [collective(nbytes, n, link) for collective in COLLECTIVES]
            found += [point_to_point(nbytes, link), many_to_one(nbytes, n, link), one_to_many(nbytes, n, link)]
            found.append(concurrent([nbytes] * n, link))
    return found


@sampled("cluster", CLUSTERS, one_in=9, ids=lambda c: c.name)
def test_every_price_rises_with_bytes_and_falls_with_the_bandwidth_between_hosts(cluster: Cluster) -> None:
    by_size = [prices(cluster, nbytes) for nbytes in (0, 1, 1e3, 1e6, 1e12)]
    for each in zip(*by_size, strict=True):
        assert list(each) == sorted(each)
    assert all(last > first or last == 0 for first, last in zip(by_size[0], by_size[-1], strict=True))
    by_bandwidth = [prices(cluster.with_bandwidth(b), 1e6) for b in (1e6, 1e7, 1e9, 1e12)]
    for each in zip(*by_bandwidth, strict=True):
        assert list(each) == pytest.approx(sorted(each, reverse=True))
    assert sum(by_bandwidth[0]) > sum(by_bandwidth[-1])
