"""The equations of Stanza, and the numbers that the paper states, from models that splitc has counted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

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
    speedup,
    step_seconds,
    symbols_of,
    throughput,
)
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.network.alpha_beta import recursive_doubling_rounds
from splitc.errors import CostError
from tests.support.paper_models import counted, inception_v3, parameters, resnet152, splitbrain_vgg
from tests.support.sampling import sampled

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

TABLE_1 = {
    "AlexNet": (61.1e6, 488.8e6, 1.56),
    "VGG-16": (138e6, 1104e6, 3.53),
    "VGG-19": (143e6, 1144e6, 3.66),
    "Inception-V3": (27e6, 216e6, 0.69),
    "ResNet-152": (60.2e6, 481.6e6, 1.54),
}
"""Parameters; bytes of gradients and parameters of one worker; seconds for four workers' at 10 Gbit/s."""


def parameters_of(model: str) -> int:
    others = {"Inception-V3": inception_v3, "ResNet-152": resnet152}
    return parameters(others[model]) if model in others else counted(model).P


@sampled("model", TABLE_1, everyday=["AlexNet"])
def test_parameters_data_sizes_and_communication_times_are_those_of_table_1(model: str) -> None:
    P, nbytes, seconds = TABLE_1[model]
    counts = parameters_of(model)
    s = replace(ALEXNET, P=counts, T_ps=0.0)
    assert counts == pytest.approx(P, rel=0.01)
    assert ps_step_seconds(s, 1, 1) * s.B == pytest.approx(nbytes, rel=0.02)
    assert ps_step_seconds(s, 4, 1) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(("model", "conv", "fc"), [("AlexNet", 2.47e6, 5.86e7), ("VGG-16", 1.47e7, 1.24e8)])
def test_conv_and_fc_parameters_are_those_of_table_2(model: str, conv: float, fc: float) -> None:
    parts = counted(model)
    assert parts.P_c == pytest.approx(conv, rel=0.01)
    assert parts.P - parts.P_c == pytest.approx(fc, rel=0.01)


def test_the_flops_of_alexnet_are_those_of_table_2() -> None:
    parts = counted("AlexNet")
    conv, fc = parts.forward_flops(parts.conv), parts.forward_flops(parts.fc)
    assert (conv, fc) == pytest.approx((1.35e9, 1.17e8), rel=0.05)
    assert conv / (conv + fc) == pytest.approx(0.92, abs=0.005)


def test_the_fc_flops_of_vgg_16_in_table_2_are_multiply_adds_and_its_conv_flops_are_of_no_convention() -> None:
    """AlexNet's row counts a multiply-add as two, this one as one; the convolutions are a smaller net's."""
    parts = counted("VGG-16")
    conv, fc = parts.forward_flops(parts.conv), parts.forward_flops(parts.fc)
    assert fc / 2 == pytest.approx(1.21e8, rel=0.05)
    assert conv / 2 > 1.4 * 1.09e10 and conv > 2.8 * 1.09e10
    smaller = counted("VGG-13")
    assert smaller.forward_flops(smaller.conv) / 2 == pytest.approx(1.09e10, rel=0.05)


def test_the_activations_of_alexnet_are_those_of_section_3() -> None:
    activations = counted("AlexNet").A
    assert activations == 9216
    assert 128 * activations == pytest.approx(1.2e6, rel=0.02)


# -- the equations -----------------------------------------------------------------------------------------------------


def test_equation_2_gives_each_fc_rank_its_share_of_the_conv_ranks() -> None:
    assert compute_seconds(ALEXNET, 8, 2) == pytest.approx(0.05 + 4 * 0.005)


def test_equation_3_adds_the_exchange_and_the_rounds_of_recursive_doubling() -> None:
    exchange = 2 * 8 * 9216 * 128 * 4 / 1.25e9
    rounds = 3 * 2.47e6 * 4 / 1.25e9
    assert step_seconds(ALEXNET, 8, 1) == pytest.approx(0.05 + 8 * 0.005 + exchange + rounds)


@pytest.mark.parametrize(
    ("n_c", "rounds"),
    [(1, 0), (2, 1), (3, 3), (4, 2), (5, 4), (6, 4), (7, 4), (8, 3), (9, 5), (64, 6), (65, 8), (79, 8)],
)
def test_equation_3_takes_log2_rounds_for_a_power_of_two_and_floor_of_it_and_two_more_for_others(
    n_c: int, rounds: int
) -> None:
    sync = step_seconds(ALEXNET, n_c, 1) - step_seconds(replace(ALEXNET, P_c=0), n_c, 1)
    assert sync == pytest.approx(rounds * 2.47e6 * 4 / 1.25e9)


@pytest.mark.parametrize("n_c", range(1, 70))
def test_the_rounds_are_those_that_the_algorithm_of_section_4_1_2_takes(n_c: int) -> None:
    """Surplus ranks give theirs away, pairs at distances 1, 2, 4, ... exchange, surplus ranks get the sum."""
    have = [{rank} for rank in range(n_c)]
    power, rounds = 1, 0
    while 2 * power <= n_c:
        power *= 2
    surplus = n_c - power
    if surplus:
        for k in range(surplus):
            have[k] |= have[power + k]
        rounds += 1
    distance = 1
    while distance < power:
        have[:power] = [have[rank] | have[rank ^ distance] for rank in range(power)]
        distance, rounds = 2 * distance, rounds + 1
    if surplus:
        have[power:] = have[:surplus]
        rounds += 1
    assert have == [set(range(n_c))] * n_c
    assert rounds == recursive_doubling_rounds(n_c)


def test_equations_4_and_7_count_the_examples_of_the_workers_only() -> None:
    assert throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / step_seconds(ALEXNET, 8, 2))
    assert ps_throughput(ALEXNET, 8, 2) == pytest.approx(8 * 128 / ps_step_seconds(ALEXNET, 8, 2))


def test_equation_6_shares_the_parameters_among_the_servers() -> None:
    assert ps_step_seconds(ALEXNET, 8, 2) == pytest.approx(0.055 + 2 * 8 * 61.1e6 * 4 / (2 * 1.25e9))
    assert ps_step_seconds(replace(ALEXNET, T_ps=0.4), 8, 2) == pytest.approx(0.4 + 2 * 8 * 61.1e6 * 4 / (2 * 1.25e9))


@pytest.mark.parametrize("seed", range(20))
def test_throughput_rises_with_bandwidth_and_step_time_with_bytes(seed: int) -> None:
    s = random_symbols(seed)
    n_c, n_f = random.Random(seed).randint(2, 40), random.Random(-seed).randint(1, 20)
    for slower, faster in pairwise(replace(s, B=s.B * factor) for factor in (0.5, 1, 3, 10)):
        assert throughput(slower, n_c, n_f) < throughput(faster, n_c, n_f)
        assert ps_throughput(slower, n_c, n_f) < ps_throughput(faster, n_c, n_f)
        assert step_seconds(slower, n_c, n_f) > step_seconds(faster, n_c, n_f)
        assert ps_step_seconds(slower, n_c, n_f) > ps_step_seconds(faster, n_c, n_f)
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


@pytest.mark.parametrize("nodes", [2, 3, 5, 10, 40, 80])
def test_equation_5_is_as_fast_as_the_fastest_of_all_divisions(nodes: int) -> None:
    for seed in range(20):
        s = random_symbols(seed)
        n_c, n_f = assign_nodes(s, nodes)
        assert n_c + n_f == nodes and throughput(s, n_c, n_f) == pytest.approx(brute_force(s, nodes))
        best = ps_throughput(s, *assign_ps_nodes(s, nodes))
        assert best == max(ps_throughput(s, n, nodes - n) for n in range(1, nodes))


@pytest.mark.parametrize("seed", range(40))
def test_with_a_memory_limit_it_is_the_fastest_of_those_that_fit(seed: int) -> None:
    s, draw = random_symbols(seed), random.Random(seed)
    nodes = draw.randint(2, 40)
    kept = Memory(0.0, conv_saved=s.K * draw.uniform(1e4, 1e7), fc_saved=s.K * draw.uniform(1e2, 1e6))
    least, most = fc_nbytes(s, kept, 1, 1), fc_nbytes(s, kept, nodes - 1, 1)
    memory = replace(kept, capacity=max(draw.uniform(0.9 * least, most), draw.choice([0, 1.1]) * conv_nbytes(s, kept)))
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


@pytest.mark.parametrize("nodes", range(2, 10))
def test_one_fc_rank_is_best_below_ten_nodes_where_convolutions_take_long(nodes: int) -> None:
    assert assign_nodes(replace(ALEXNET, T_c=0.3), nodes) == (nodes - 1, 1)


def test_a_large_cluster_wants_more_than_one_fc_rank() -> None:
    assert assign_nodes(ALEXNET, 80)[1] > 1


def test_one_node_cannot_be_divided() -> None:
    with pytest.raises(CostError, match="at least 2"):
        assign_nodes(ALEXNET, 1)
    with pytest.raises(CostError, match="at least 2"):
        assign_ps_nodes(ALEXNET, 1)


@pytest.mark.parametrize("nodes", [5, 10, 20, 40])
def test_twice_the_nodes_have_at_least_twice_the_throughput_of_parameter_servers(nodes: int) -> None:
    """So the 1.7 to 1.9 times that section 7.2 states for 40 and 80 nodes are not equations (6) and (7) alone."""
    for seed in range(20):
        s = random_symbols(seed)
        small, large = (ps_throughput(s, *assign_ps_nodes(s, n)) for n in (nodes, 2 * nodes))
        assert large >= 2 * small * (1 - 1e-12)


# -- captured models on V100 -------------------------------------------------------------------------------------------

V100 = load_cluster("v100-10gbe").device
BATCH = {"AlexNet": 128, "VGG-16": 64, "VGG-19": 64}
"""Table 5."""


@pytest.mark.parametrize("model", BATCH)
def test_a_v100_has_the_memory_of_one_fc_worker_for_ten_conv_workers(model: str) -> None:
    """Footnote 4."""
    parts, K = counted(model), BATCH[model]
    assert fits(symbols_of(parts, K, 10 * GBIT, V100), memory_of(parts, K, V100), 10, 1)


@pytest.mark.parametrize("model", ["VGG-16", "VGG-19"])
def test_a_v100_has_no_memory_for_the_batch_of_vggs_own_paper(model: str) -> None:
    """Footnote 6 takes those batches, and the memory of a GPU into account; VGG's is 256."""
    parts = counted(model)
    with pytest.raises(CostError, match="take a batch K smaller than 256"):
        assign_nodes(symbols_of(parts, 256, 40 * GBIT, V100), 80, memory_of(parts, 256, V100))


@pytest.mark.parametrize(("nodes", "gbits"), [(80, 40), (40, 25), (80, 100)])
@pytest.mark.parametrize("model", BATCH)
def test_layer_separation_beats_the_parameter_server_in_large_clusters(model: str, nodes: int, gbits: int) -> None:
    """Figure 8; the page of the papers' numbers says how near the ratios come."""
    parts, K = counted(model), BATCH[model]
    s = symbols_of(parts, K, gbits * GBIT, V100)
    assert speedup(s, nodes, memory_of(parts, K, V100)) > 1
    assert speedup(s, nodes) > speedup(replace(s, B=2 * s.B), nodes)


def test_the_symbols_of_a_model_are_its_counts_and_its_seconds() -> None:
    parts = conv_fc_split(splitbrain_vgg())
    s = symbols_of(parts, 4, 1e9, V100)
    assert (s.P, s.P_c, s.A, s.K, s.B) == (6_987_456, 1_734_336, 4096, 4, 1e9)
    assert s.T_c == pytest.approx(parts.seconds(parts.conv, 4, V100)) and 0 < s.T_f < s.T_c


def test_a_model_of_linear_layers_alone_has_conv_fc_split_where_the_user_says_so() -> None:
    program = splitbrain_vgg()
    upper = conv_fc_split(program, fc=["fc1", "fc2"])
    assert upper.A == 1024 and upper.fc == ("fc1", "fc2") and "fc0" in upper.conv
    with pytest.raises(CostError, match="0 of 10 layers are fully connected, 10 are not"):
        conv_fc_split(program, fc=[])
