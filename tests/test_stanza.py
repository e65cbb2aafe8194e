"""The equations of the paper, and numbers it states."""

from dataclasses import replace

import pytest

from cost_models.stanza import (
    Symbols,
    assign_nodes,
    assign_ps_nodes,
    compute_seconds,
    ps_step_seconds,
    ps_throughput,
    step_seconds,
    throughput,
)
from splitc.errors import CostError

ALEXNET = Symbols(K=128, P=61.1e6, A=9216, P_c=2.47e6, B=1.25e9, T_c=0.05, T_f=0.005)
"""AlexNet on V100 with 10 Gbit/s: sizes from tables 1 to 3, times of the right order."""


def test_four_workers_exchange_alexnet_with_one_server_in_the_seconds_of_table_1():
    assert ps_step_seconds(replace(ALEXNET, T_ps=0.0), 4, 1) == pytest.approx(1.56, rel=0.01)


def test_equation_2_gives_each_fc_rank_its_share_of_the_conv_ranks():
    assert compute_seconds(ALEXNET, 8, 2) == pytest.approx(0.05 + 4 * 0.005)


def test_equation_3_adds_the_exchange_and_the_rounds_of_recursive_doubling():
    exchange = 2 * 8 * 9216 * 128 * 4 / 1.25e9
    rounds = 3 * 2.47e6 * 4 / 1.25e9
    assert step_seconds(ALEXNET, 8, 1) == pytest.approx(0.05 + 8 * 0.005 + exchange + rounds)


def test_equation_3_takes_floor_of_log2_and_two_rounds_more_for_ten_ranks():
    rounds = step_seconds(ALEXNET, 10, 1) - step_seconds(replace(ALEXNET, P_c=0), 10, 1)
    assert rounds == pytest.approx(5 * 2.47e6 * 4 / 1.25e9)


def test_one_conv_rank_reduces_nothing():
    with_gradients, without = ALEXNET, replace(ALEXNET, P_c=0)
    assert step_seconds(with_gradients, 1, 1) == step_seconds(without, 1, 1)


def test_equations_4_and_7_count_the_examples_of_the_workers_only():
    assert throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / step_seconds(ALEXNET, 8, 2))
    assert ps_throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / ps_step_seconds(ALEXNET, 8, 2))


@pytest.mark.parametrize("nodes", [2, 3, 5, 10, 40, 80])
def test_equation_5_is_at_least_as_fast_as_every_other_division(nodes):
    best = throughput(ALEXNET, *assign_nodes(ALEXNET, nodes))
    assert all(best >= throughput(ALEXNET, n, nodes - n) for n in range(1, nodes))
    best = ps_throughput(ALEXNET, *assign_ps_nodes(ALEXNET, nodes))
    assert all(best >= ps_throughput(ALEXNET, n, nodes - n) for n in range(1, nodes))


@pytest.mark.parametrize("nodes", range(2, 10))
def test_one_fc_rank_is_best_below_ten_nodes_where_convolutions_take_long(nodes):
    assert assign_nodes(replace(ALEXNET, T_c=0.3), nodes) == (nodes - 1, 1)


def test_a_large_cluster_wants_more_than_one_fc_rank():
    assert assign_nodes(ALEXNET, 80)[1] > 1


def test_one_node_cannot_be_divided():
    with pytest.raises(CostError, match="at least 2"):
        assign_nodes(ALEXNET, 1)
