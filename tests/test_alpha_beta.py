"""Latency plus bytes over bandwidth."""

import pytest

from cost_models.alpha_beta import (
    all_gather,
    many_to_one,
    one_to_many,
    point_to_point,
    recursive_doubling,
    recursive_doubling_rounds,
    reduce_scatter,
    ring_all_reduce,
)
from splitc.cluster import Link

LINK = Link(bandwidth=1e9, latency=1e-3)
HALF_DUPLEX = Link(bandwidth=1e9, latency=1e-3, duplex=False)
COLLECTIVES = (ring_all_reduce, reduce_scatter, all_gather, recursive_doubling)


def test_one_message_takes_its_latency_and_its_bytes():
    assert point_to_point(1e9, LINK) == pytest.approx(1.001)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_of_one_rank_costs_nothing(collective):
    assert collective(1e9, 1, LINK) == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n", range(2, 20))
def test_a_collective_grows_with_its_bytes(collective, n):
    costs = [collective(nbytes, n, LINK) for nbytes in (0, 1, 1e3, 1e6, 1e9)]
    assert costs == sorted(costs)
    assert costs[0] > 0


def test_a_ring_all_reduce_sends_its_bytes_almost_twice():
    assert ring_all_reduce(1e9, 4, LINK) == pytest.approx(2 * 3 / 4 + 6 * 1e-3)


@pytest.mark.parametrize("n", range(1, 20))
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(n):
    parts = reduce_scatter(1e6, n, LINK) + all_gather(1e6, n, LINK)
    assert ring_all_reduce(1e6, n, LINK) == pytest.approx(parts)


def test_many_to_one_is_bound_by_the_link_that_all_messages_share():
    assert many_to_one(1e9, 5, LINK) == pytest.approx(5 + 5e-3)
    assert one_to_many(1e9, 5, LINK) == many_to_one(1e9, 5, LINK)


@pytest.mark.parametrize(("n", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (7, 4), (8, 3), (10, 5), (80, 8)])
def test_recursive_doubling_takes_floor_log2_rounds_and_two_for_surplus_ranks(n, rounds):
    assert recursive_doubling_rounds(n) == rounds
    assert recursive_doubling(1e9, n, LINK) == pytest.approx(rounds * 1.001)


def test_a_link_that_is_not_duplex_takes_twice_as_long_where_both_directions_are_used():
    assert ring_all_reduce(1e9, 2, HALF_DUPLEX) == pytest.approx(2 * 1.001)
    assert ring_all_reduce(1e9, 2, LINK) == pytest.approx(1.002)
    assert point_to_point(1e9, HALF_DUPLEX) == point_to_point(1e9, LINK)
