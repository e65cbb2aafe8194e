"""The parts that ranks on unequal lines add up: none are better, and what they take is what the slowest line takes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.network.alpha_beta import ring_all_reduce
from splitc.cost_models.network.sum_shares import shared_sum, sum_shares
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Link
from splitc.runtime.transport.collective import PIECE

NBYTES = 1e9


def with_lines(*rates: float, duplex: bool = True) -> Cluster:
    """A cluster whose ranks have lines of these bandwidths (bytes/s) and no latency."""
    cluster = load_cluster("v100-10gbe")
    first, *others = (Link(rate, 0.0, duplex) for rate in rates)
    unlike = tuple(Unlike((rank,), cluster.device, link) for rank, link in enumerate(others, start=1))
    return replace(cluster, link=first, unlike=unlike, local_link=None, ranks_per_host=None, world=len(rates))


def test_a_rank_on_a_slow_line_has_a_small_part_or_none() -> None:
    for rates, expected in (
        ((4, 4, 4, 1), (100, 100, 100, 0)),
        ((4, 4, 4, 3), (100, 100, 100, 33)),
        ((1, 9, 9), (0, 100, 100)),
        ((1, 2, 3, 4), (0, 9, 55, 100)),
    ):
        assert sum_shares(with_lines(*rates), len(rates)) == expected, rates


def test_alike_lines_two_ranks_hosts_and_sites_have_none() -> None:
    assert sum_shares(with_lines(1, 1, 1, 1), 4) == ()
    assert sum_shares(with_lines(1, 4), 2) == ()
    cluster = with_lines(1, 4, 4, 4)
    assert sum_shares(replace(cluster, local_link=cluster.link, ranks_per_host=2), 4) == ()
    thin = Link(0.5, 0.0, shared=True)
    sites = replace(cluster, site_link=thin, ranks_per_site=2)
    assert sum_shares(sites, 4) == ()
    assert shared_sum(NBYTES, sites, range(4), (0, 1, 1, 1)) > 4 * shared_sum(NBYTES, cluster, range(4), (0, 1, 1, 1))


def test_a_sum_takes_what_the_busiest_line_carries_one_way_or_both() -> None:
    cluster, shares = with_lines(4e6, 4e6, 4e6, 1e6), (100, 100, 100, 0)
    assert shared_sum(NBYTES, cluster, range(4), shares) == pytest.approx((NBYTES + PIECE) / 1e6)
    assert ring_all_reduce(NBYTES, 4, cluster.link_over(range(4))) == pytest.approx(1.5 * NBYTES / 1e6)
    half = with_lines(4e6, 4e6, 4e6, 1e6, duplex=False)
    assert shared_sum(NBYTES, half, range(4), shares) == pytest.approx(2 * (NBYTES + PIECE) / 1e6)
    equal = shared_sum(NBYTES, cluster, range(4), (1, 1, 1, 1))
    assert equal == pytest.approx((1.5 * NBYTES + PIECE) / 1e6)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_shares_are_faster(seed: int) -> None:
    drawn = random.Random(seed)
    for world in (3, 4, 7):
        cluster = with_lines(*(10 ** drawn.uniform(6, 7) for _ in range(world)))
        shares = sum_shares(cluster, world)
        best = shared_sum(NBYTES, cluster, range(world), shares)
        for _ in range(200):
            others = [drawn.choice((0.0, 1.0)) * share + drawn.random() * 100 * drawn.random() for share in shares]
            assert shared_sum(NBYTES, cluster, range(world), [round(100 * each) for each in others]) > 0.98 * best
        assert best <= ring_all_reduce(NBYTES, world, cluster.link_over(range(world))) + NBYTES * 1e-9
