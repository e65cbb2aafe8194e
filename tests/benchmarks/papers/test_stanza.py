"""The equations of Stanza, and the numbers that the paper states, from models that splitc has counted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from benchmarks.papers.conv_fc_split import conv_fc_split
from benchmarks.papers.stanza import (
    Memory,
    Symbols,
    assign_nodes,
    assign_ps_nodes,
    compute_seconds,
    conv_nbytes,
    fc_nbytes,
    fits,
    memory_of,
    ps_step_seconds,
    ps_throughput,
    step_seconds,
    symbols_of,
    throughput,
)
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import CostError
from tests.support.paper_models import counted, splitbrain_vgg

GBIT = 1e9 / 8
ALEXNET = Symbols(K=128, P=61.1e6, A=9216, P_c=2.47e6, B=10 * GBIT, T_c=0.05, T_f=0.005)
"""AlexNet on V100 with 10 Gbit/s: sizes from tables 1 to 3, times of the right order."""


def random_symbols(seed: int) -> Symbols:
    draw = random.Random(seed)
    P = 10 ** draw.uniform(6, 8.5)
    return Symbols(
        K=draw.choice([16, 32, 64, 128, 256]),
        P=P,
        A=draw.randint(100, 30_000),
        P_c=P * draw.uniform(0.01, 0.9),
        B=10 ** draw.uniform(8, 10.5),
        T_c=10 ** draw.uniform(-2.5, 0.5),
        T_f=10 ** draw.uniform(-3.5, -0.5),
    )


# -- the paper's tables ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fc_flops_of_vgg_16_in_table_2_are_multiply_adds_and_its_conv_flops_are_of_no_convention() -> None:
    """AlexNet's row counts a multiply-add as two, this one as one; the convolutions are a smaller net's."""
    parts = counted("VGG-16")
    conv, fc = parts.forward_flops(parts.conv), parts.forward_flops(parts.fc)
    assert fc / 2 == pytest.approx(1.21e8, rel=0.05)
    assert conv / 2 > 1.4 * 1.09e10 and conv > 2.8 * 1.09e10
    smaller = counted("VGG-13")
    assert smaller.forward_flops(smaller.conv) / 2 == pytest.approx(1.09e10, rel=0.05)


# -- the equations -----------------------------------------------------------------------------------------------------


def test_equation_2_gives_each_fc_rank_its_share_of_the_conv_ranks() -> None:
    assert compute_seconds(ALEXNET, 8, 2) == pytest.approx(0.05 + 4 * 0.005)


def test_equation_3_adds_the_exchange_and_the_rounds_of_recursive_doubling() -> None:
    exchange = 2 * 8 * 9216 * 128 * 4 / 1.25e9
    rounds = 3 * 2.47e6 * 4 / 1.25e9
    assert step_seconds(ALEXNET, 8, 1) == pytest.approx(0.05 + 8 * 0.005 + exchange + rounds)


def test_equation_3_takes_log2_rounds_for_a_power_of_two_and_floor_of_it_and_two_more_for_others() -> None:
    rounds = {1: 0, 2: 1, 3: 3, 4: 2, 5: 4, 6: 4, 7: 4, 8: 3, 9: 5, 64: 6, 65: 8, 79: 8}
    for n_c, number in rounds.items():
        sync = step_seconds(ALEXNET, n_c, 1) - step_seconds(replace(ALEXNET, P_c=0), n_c, 1)
        assert sync == pytest.approx(number * 2.47e6 * 4 / 1.25e9)


def test_equations_4_and_7_count_the_examples_of_the_workers_only() -> None:
    assert throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / step_seconds(ALEXNET, 8, 2))
    assert ps_throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / ps_step_seconds(ALEXNET, 8, 2))


def test_equation_6_shares_the_parameters_among_the_servers() -> None:
    assert ps_step_seconds(ALEXNET, 8, 2) == pytest.approx(0.055 + 2 * 8 * 61.1e6 * 4 / (2 * 1.25e9))
    assert ps_step_seconds(replace(ALEXNET, T_ps=0.4), 8, 2) == pytest.approx(0.4 + 2 * 8 * 61.1e6 * 4 / (2 * 1.25e9))


def test_throughput_rises_with_bandwidth_and_step_time_with_bytes() -> None:
    for seed in range(20):
        s = random_symbols(seed)
        n_c, n_f = random.Random(seed).randint(2, 40), random.Random(-seed).randint(1, 20)
        for slower, faster in pairwise(replace(s, B=s.B * factor) for factor in (0.5, 1, 3, 10)):
            assert throughput(slower, n_c, n_f) < throughput(faster, n_c, n_f)
            assert ps_throughput(slower, n_c, n_f) < ps_throughput(faster, n_c, n_f)
            assert throughput(slower, *assign_nodes(slower, 20)) < throughput(faster, *assign_nodes(faster, 20))
        for more in (replace(s, A=2 * s.A), replace(s, P_c=2 * s.P_c), replace(s, K=2 * s.K), replace(s, itemsize=8)):
            assert step_seconds(more, n_c, n_f) > step_seconds(s, n_c, n_f)
        assert ps_step_seconds(replace(s, P=2 * s.P), n_c, n_f) > ps_step_seconds(s, n_c, n_f)


# -- node assignment ---------------------------------------------------------------------------------------------------


def brute_force(s: Symbols, nodes: int, memory: Memory | None = None) -> float:
    """The largest throughput of all divisions that fit; 0 where none does."""
    best = 0.0
    for n_f in range(1, nodes):
        n_c = nodes - n_f
        if memory is not None:
            served = max(len(range(k, n_c, n_f)) for k in range(n_f))  # dealt out one by one
            conv = 12 * s.P_c + memory.conv_saved
            fc = 12 * (s.P - s.P_c) + served * (memory.fc_saved + 8 * s.A * s.K)
            if max(conv, fc) > memory.capacity:
                continue
        best = max(best, n_c * s.K / step_seconds(s, n_c, n_f))
    return best


def test_equation_5_is_as_fast_as_the_fastest_of_all_divisions() -> None:
    for nodes, seed in product((2, 3, 5, 10, 40, 80), range(20)):
        s = random_symbols(seed)
        n_c, n_f = assign_nodes(s, nodes)
        assert n_c + n_f == nodes and throughput(s, n_c, n_f) == pytest.approx(brute_force(s, nodes))
        best = ps_throughput(s, *assign_ps_nodes(s, nodes))
        assert best == max(ps_throughput(s, n, nodes - n) for n in range(1, nodes))
        assert ps_throughput(s, *assign_ps_nodes(s, 2 * nodes)) >= 2 * best * (
            1 - 1e-12
        )  # section 7.2 states 1.7 to 1.9


def test_with_a_memory_limit_it_is_the_fastest_of_those_that_fit() -> None:
    for seed in range(40):
        s, draw = random_symbols(seed), random.Random(seed)
        nodes = draw.randint(2, 40)
        kept = Memory(0.0, conv_saved=s.K * draw.uniform(1e4, 1e7), fc_saved=s.K * draw.uniform(1e2, 1e6))
        least, most = fc_nbytes(s, kept, 1, 1), fc_nbytes(s, kept, nodes - 1, 1)
        enough = draw.choice([0, 1.1]) * conv_nbytes(s, kept)
        memory = replace(kept, capacity=max(draw.uniform(0.9 * least, most), enough))
        best = brute_force(s, nodes, memory)
        if best == 0.0:
            with pytest.raises(CostError, match="no assignment of"):
                assign_nodes(s, nodes, memory)
        else:
            chosen = assign_nodes(s, nodes, memory)
            assert fits(s, memory, *chosen) and throughput(s, *chosen) == pytest.approx(best)


def test_less_memory_takes_more_fc_workers_and_lowers_the_throughput() -> None:
    s = replace(ALEXNET, T_c=0.3)
    kept = Memory(1e15, conv_saved=5e8, fc_saved=1e7)
    free = assign_nodes(s, 9, kept)
    assert free == assign_nodes(s, 9) == (8, 1)
    tight = assign_nodes(s, 9, replace(kept, capacity=fc_nbytes(s, kept, 8, 1) - 1))
    assert tight == (7, 2) and throughput(s, *tight) < throughput(s, *free)


def test_where_nothing_fits_the_error_gives_the_numbers() -> None:
    with pytest.raises(
        CostError, match=r"80 nodes with 1\.00 GB each.*CONV worker needs 530 MB.*smaller than 128"
    ) as told:
        assign_nodes(ALEXNET, 80, Memory(1e9, conv_saved=5e8, fc_saved=9e8))
    assert "an FC worker that serves one of them 1.61 GB" in str(told.value)


def test_one_fc_rank_is_best_below_ten_nodes_where_convolutions_take_long() -> None:
    for nodes in range(2, 10):
        assert assign_nodes(replace(ALEXNET, T_c=0.3), nodes) == (nodes - 1, 1)


def test_one_node_cannot_be_divided() -> None:
    with pytest.raises(CostError, match="at least 2"):
        assign_nodes(ALEXNET, 1)
    with pytest.raises(CostError, match="at least 2"):
        assign_ps_nodes(ALEXNET, 1)


# -- captured models on V100 -------------------------------------------------------------------------------------------

V100 = load_cluster("v100-10gbe").device
BATCH = {"AlexNet": 128, "VGG-16": 64, "VGG-19": 64}
"""Table 5."""


@pytest.mark.slow
def test_a_v100_has_the_memory_of_one_fc_worker_for_ten_conv_workers_and_none_for_the_batch_of_vggs_own_paper() -> None:
    """Footnotes 4 and 6; VGG's batch is 256."""
    for model, K in BATCH.items():
        parts = counted(model)
        assert fits(symbols_of(parts, K, 10 * GBIT, V100), memory_of(parts, K, V100), 10, 1)
        if model != "AlexNet":
            with pytest.raises(CostError, match="take a batch K smaller than 256"):
                assign_nodes(symbols_of(parts, 256, 40 * GBIT, V100), 80, memory_of(parts, 256, V100))


@pytest.mark.slow
def test_the_symbols_of_a_model_are_its_counts_and_its_seconds() -> None:
    parts = conv_fc_split(splitbrain_vgg())
    s = symbols_of(parts, 4, 1e9, V100)
    assert (s.P, s.P_c, s.A, s.K, s.B) == (6_987_456, 1_734_336, 4096, 4, 1e9)
    assert s.T_c == pytest.approx(parts.seconds(parts.conv, 4, V100)) and 0 < s.T_f < s.T_c


@pytest.mark.slow
def test_a_model_of_linear_layers_alone_has_conv_fc_split_where_the_user_says_so() -> None:
    program = splitbrain_vgg()
    upper = conv_fc_split(program, fc=["fc1", "fc2"])
    assert upper.A == 1024 and upper.fc == ("fc1", "fc2") and "fc0" in upper.conv
    with pytest.raises(CostError, match="0 of 10 layers are fully connected, 10 are not"):
        conv_fc_split(program, fc=[])
