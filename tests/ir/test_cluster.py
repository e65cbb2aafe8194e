"""What ranks compute on and talk over: unequal ones, hosts, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest

from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.device import Device, Link, Rate
from tests.support.random_clusters import random_cluster
from tests.support.small_programs import small_cluster

FAST = Device("fast", {"float32": 8e12, "bfloat16": 1e14}, 8e11, 8e10, {"matmul": 0.5, "memory": 0.5}, 1e-6)
SLOW = Device("slow", {"float32": 2e12}, 4e11, 4e10, {"matmul": 0.25, "conv_backward": 0.1, "memory": 1.0}, 5e-6)
NET, INSIDE = Link(1e9, 1e-4), Link(1e11, 1e-6)
SHARED = replace(NET, shared=True)


def hosts(link: Link = NET, ranks: int = 4, **others: object) -> Cluster:
    return replace(Cluster("hosts", FAST, link, local_link=INSIDE, ranks_per_host=ranks), **others)  # type: ignore[arg-type]


def odd(*ranks: int, device: Device = FAST, link: Link = NET) -> Unlike:
    return Unlike(ranks, device, link)


# -- devices -----------------------------------------------------------------------------------------------------------


def test_an_op_class_reaches_its_own_part_else_forwards_else_that_of_products() -> None:
    device = replace(FAST, efficiency={"matmul": 0.5, "memory": 0.8, "conv": 0.4, "matmul_backward": 0.3})
    assert device.efficiency_of("matmul") == 0.5
    assert device.efficiency_of("matmul", backward=True) == 0.3
    assert device.efficiency_of("conv") == device.efficiency_of("conv", backward=True) == 0.4
    assert device.efficiency_of("attention") == 0.5
    assert device.efficiency_of("attention", backward=True) == 0.3
    assert device.efficiency_of("memory", backward=True) == 0.8


def test_a_rank_has_the_device_that_is_given_for_it() -> None:
    cluster = replace(small_cluster(), unlike=(odd(1, device=FAST), odd(3, 4, device=SLOW)))
    assert [cluster.device_of(rank).name for rank in range(6)] == ["toy", "fast", "toy", "slow", "slow", "toy"]


def test_ranks_that_share_a_device_get_equal_parts_of_it() -> None:
    cluster = small_cluster(ranks_share_device=True)
    part = cluster.device_for(4)
    assert part.flop_rate == {"float32": 0.25e6}
    assert part.memory_bandwidth == 0.25e6
    assert part.memory == 0.25e9
    assert cluster.device_for(1) == cluster.device


def test_ranks_that_share_cores_have_one_each_while_there_are_enough() -> None:
    cluster = Cluster("cpu", replace(FAST, launch=1e-6), NET, ranks_share_device=True, cores=4)
    for ranks in (2, 4):
        part = cluster.device_for(ranks)
        assert (part.flop_rate, part.launch) == (FAST.flop_rate, 1e-6)
        assert part.memory == FAST.memory / ranks
    part = cluster.device_for(8)
    assert part.flop_rate["float32"] == FAST.flop_rate["float32"] / 2
    assert part.launch == 2e-6


def test_only_ranks_of_one_host_share_its_cores() -> None:
    cluster = replace(hosts(), ranks_share_device=True, cores=2)
    assert cluster.device_for(4) == cluster.device_for(16) == cluster.device_of(15, 16)
    assert cluster.device_for(4).flop_rate["float32"] == FAST.flop_rate["float32"] / 2
    assert cluster.device_for(4).memory == FAST.memory / 4


def test_the_slowest_of_the_first_ranks_is_priced() -> None:
    cluster = Cluster("mixed", FAST, NET, unlike=(odd(2, 3, device=SLOW),))
    assert cluster.device_for(2) is FAST
    slowest = cluster.device_for(3)
    assert slowest.name == "fast and slow"
    assert slowest.flop_rate == SLOW.flop_rate  # dtypes that both have
    assert slowest.memory == SLOW.memory
    assert slowest.launch == SLOW.launch
    assert replace(cluster, unlike=(odd(0, 1, 2, device=SLOW),)).device_for(2) is SLOW


def test_a_device_that_reaches_less_of_a_higher_peak_is_not_priced_below_what_it_does() -> None:
    idle = replace(FAST, name="idle", flop_rate={"float32": 1e14}, efficiency={"matmul": 0.01, "memory": 0.5})
    slowest = Cluster("mixed", SLOW, NET, unlike=(odd(1, device=idle),)).device_for(2)
    assert slowest.flop_rate["float32"] * slowest.efficiency_of("matmul") == pytest.approx(0.25 * 2e12)
    assert slowest.flop_rate["float32"] * slowest.efficiency_of("conv", backward=True) == pytest.approx(0.1 * 2e12)
    assert slowest.memory_bandwidth * slowest.efficiency_of("memory") == pytest.approx(4e11)


def test_no_rank_is_slower_in_anything_than_the_device_that_is_priced() -> None:
    for cluster, ranks in product(map(random_cluster, range(20)), (1, 3, 16)):
        priced = cluster.device_for(ranks)
        for own in (cluster.device_of(rank, ranks) for rank in range(ranks)):
            assert own.memory >= priced.memory * (1 - 1e-9)
            assert own.launch <= priced.launch * (1 + 1e-9)
            for op, back, dtype in product(("matmul", "conv", "attention"), (False, True), priced.flop_rate):
                reached = priced.flop_rate[dtype] * priced.efficiency_of(op, back)
                assert own.flop_rate[dtype] * own.efficiency_of(op, back) >= reached * (1 - 1e-9)
            moved = priced.memory_bandwidth * priced.efficiency_of("memory")
            assert own.memory_bandwidth * own.efficiency_of("memory") >= moved * (1 - 1e-9)


# -- links -------------------------------------------------------------------------------------------------------------


def test_without_hosts_and_unlike_ranks_everything_runs_on_the_one_link() -> None:
    cluster = small_cluster()
    assert cluster.link_of(3) is cluster.link_over((0, 5)) is cluster.link_over(range(7)) is cluster.link
    assert cluster.link_over((0, 2), (1, 3)) is cluster.link_across((0, 1), (2,)) is cluster.link
    assert cluster.host_of(5) == 5


def test_ranks_of_a_host_have_its_own_link_and_others_that_between_hosts() -> None:
    cluster = hosts()
    assert [cluster.host_of(rank) for rank in (0, 3, 4, 8)] == [0, 0, 1, 2]
    assert cluster.link_over((0, 3)) is cluster.link_over(range(4)) is cluster.link_across((4, 5), (6,)) is INSIDE
    assert cluster.link_over((3, 4)) == cluster.link_across((2, 3), (4,)) == NET
    assert cluster.link_of(1) is NET


def test_a_path_is_as_slow_as_its_slower_end_in_everything() -> None:
    slow = Link(1e8, 1e-3, duplex=False, processor=1e-9)
    cluster = Cluster("mixed", FAST, NET, unlike=(odd(2, link=slow), odd(3, link=Link(1e7, 1e-5))))
    assert cluster.link_over((0, 1)) is NET
    assert cluster.link_over((0, 2)) == slow
    assert cluster.link_over((2, 3)) == Link(1e7, 1e-3, duplex=False, processor=1e-9)
    assert cluster.link_over(range(2)) is NET
    assert cluster.link_over((0, 1, 3)) == cluster.link_over((0, 1), (0, 3)) == Link(1e7, 1e-4)


def test_what_a_collective_was_measured_at_counts_where_it_was_on_all_links() -> None:
    one, two = (replace(NET, collectives={"all_reduce": Rate(b, s)}) for b, s in ((5e8, 1e-3), (9e8, 2e-3)))
    cluster = Cluster("mixed", FAST, one, unlike=(odd(2, link=two), odd(3)))
    assert cluster.link_over(range(3)).collectives == {"all_reduce": Rate(5e8, 2e-3)}
    assert cluster.link_over(range(4)).collectives == {}


def test_a_ring_over_hosts_takes_the_links_of_all_their_ranks_together() -> None:
    assert hosts().link_over(range(8)) == replace(NET, bandwidth=4e9)
    assert hosts().link_over(range(9)) == NET  # one rank alone on the last host
    assert hosts().link_over((0, 4)) == NET
    assert hosts().link_over((0, 1, 4, 5)) == replace(NET, bandwidth=2e9)
    near = hosts(replace(NET, bandwidth=9e10))
    assert near.link_over(range(8)).bandwidth == INSIDE.bandwidth  # the way out is wider than the way inside


def test_a_ring_over_hosts_has_the_link_that_their_ranks_share_for_itself() -> None:
    assert hosts(SHARED).link_over(range(8)) == hosts(SHARED).link_over((0, 4)) == SHARED


def test_rings_at_once_divide_a_shared_link() -> None:
    strided = [range(k, 8, 4) for k in range(4)]
    assert hosts(SHARED).link_over(*strided) == SHARED.divided(4)
    assert hosts().link_over(*strided) == NET
    assert hosts(SHARED).link_over(range(4), range(4, 8)) is INSIDE
    assert hosts(SHARED).link_over(range(2), range(2, 6), range(6, 8)) == SHARED  # only the second leaves its host


def test_messages_of_every_rank_divide_a_shared_link() -> None:
    assert hosts(SHARED).link_over(range(8), rings=False) == SHARED.divided(4)
    assert hosts().link_over(range(8), rings=False) == NET
    assert hosts(SHARED).link_over(range(4), rings=False) is INSIDE


def test_a_measured_collective_is_divided_with_its_link_and_not_multiplied_by_ranks() -> None:
    rate = Rate(5e8, 1e-3)
    own = replace(NET, collectives={"all_reduce": rate})
    assert hosts(own).link_over(range(8)).collectives == {"all_reduce": rate}
    strided = [range(k, 8, 4) for k in range(4)]
    divided = hosts(replace(own, shared=True)).link_over(*strided)
    assert divided.collectives == {"all_reduce": Rate(1.25e8, 1e-3)}


def test_the_slowest_host_bounds_a_ring() -> None:
    slow = odd(*range(4, 8), link=replace(NET, bandwidth=1e7))
    assert hosts(unlike=(slow,)).link_over(range(8)).bandwidth == 4e7
    assert hosts(unlike=(slow,)).link_over(range(4)) is INSIDE
    assert hosts(unlike=(odd(5, link=replace(NET, bandwidth=1e7)),)).link_over(range(8)).bandwidth == 4e7


def test_messages_between_roles_divide_the_links_that_ranks_share() -> None:
    cases: list[tuple[Sequence[int], Sequence[int], int]] = [
        (range(4), range(4, 8), 4),  # four to four: each host sends what four ranks do
        (range(4), (4,), 1),  # many to one: the one link carries all of it
        ((4,), range(4), 1),
        (range(7), (7,), 1),
        (range(8), (8, 9), 2),  # two receivers on one host
        (range(12), (12, 16), 1),  # on two hosts
        (range(8), range(8), 4),  # servers beside workers
    ]
    for here, there, users in cases:
        assert hosts(SHARED).link_across(here, there) == SHARED.divided(users)
        assert hosts().link_across(here, there) == NET


def test_more_bandwidth_between_hosts_leaves_the_one_inside() -> None:
    rate = Rate(5e8, 1e-3)
    link = replace(NET, collectives={"all_reduce": rate})
    cluster = hosts(link, unlike=(odd(1, link=replace(link, bandwidth=2e9)),)).with_bandwidth(4e9)
    assert cluster.link.bandwidth == cluster.unlike[0].link.bandwidth == 4e9
    assert cluster.link.collectives["all_reduce"] == Rate(2e9, 1e-3)
    assert cluster.unlike[0].link.collectives["all_reduce"] == Rate(1e9, 1e-3)
    assert cluster.local_link is INSIDE


def test_links_do_not_depend_on_the_order_of_ranks_and_a_group_is_no_faster_beside_others() -> None:
    for cluster in map(random_cluster, range(20)):
        for a, b in combinations(range(16), 2):
            assert cluster.link_over((a, b)) == cluster.link_over((b, a))
        groups = [range(k, 16, 4) for k in range(4)]
        together = cluster.link_over(*groups)
        for group in groups:
            assert cluster.link_over(group).bandwidth >= together.bandwidth
            assert cluster.link_over(tuple(reversed(group))) == cluster.link_over(group)


# -- sites -------------------------------------------------------------------------------------------------------------

THIN = Link(1e6, 5e-2, shared=True)


def test_what_crosses_sites_takes_the_line_between_them() -> None:
    sites = hosts(ranks=2, site_link=THIN, ranks_per_site=4)
    assert sites.link_over((0, 1)) == INSIDE and sites.link_over((0, 3), (4, 6)) == NET
    assert sites.link_over((0, 1, 4)) == THIN
    assert sites.link_over((0, 4), (1, 5)).bandwidth == 5e5  # two rings on one line
    assert sites.link_over((0, 1, 4), rings=False).bandwidth == 5e5
    assert sites.link_over((0, 1), (2, 6)) == replace(THIN, bandwidth=1e6)  # the slowest of them
    own = replace(sites, site_link=replace(THIN, shared=False))
    assert own.link_over((0, 4), (1, 5)) == own.site_link


def test_messages_between_roles_of_two_sites_share_the_line() -> None:
    sites = replace(small_cluster(), site_link=THIN, ranks_per_site=2)
    assert sites.link_across((0,), (1,)) == sites.link
    assert sites.link_across((0, 1), (2, 3)).bandwidth == 5e5
    assert sites.link_across((0, 1), (2,)).bandwidth == 1e6  # whose own messages take all of it
