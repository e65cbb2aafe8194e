"""The data sizes of Practical Lessons' table 2, and when late-multiply moves less, against what programs send."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.practical_lessons import (
    Layer,
    data_parallel_nbytes,
    hybrid_nbytes,
    late_multiply_moves_less,
    late_multiply_nbytes,
    reduce_broadcast_nbytes,
    weight_gradient_flops,
)
from examples.mlp import MLP
from splitc.errors import CostError
from splitc.ir.graph import tensor_spec
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from tests.support.compiled import compiled
from tests.support.paper_models import counted

MIB = 2**20


# -- table 2 -----------------------------------------------------------------------------------------------------------


def test_the_alexnet_of_table_2_has_convolutions_in_groups() -> None:
    parts = counted("AlexNet with groups")
    assert parts.P_c == pytest.approx(2.33e6, rel=0.005)
    whole = 4 * parts.P / MIB
    assert whole == pytest.approx(232, rel=0.005)
    assert 1 - parts.P_c / parts.P == pytest.approx(0.96, abs=0.005)


@pytest.mark.parametrize(("n", "mebibytes"), [(1, 0), (2, 930), (4, 1861), (8, 3722)])
def test_data_parallelism_exchanges_the_data_of_table_2(n: int, mebibytes: float) -> None:
    assert data_parallel_nbytes(counted("AlexNet with groups").P, n) / MIB == pytest.approx(mebibytes, rel=0.02)


@pytest.mark.parametrize(("n", "mebibytes"), [(1, 0), (2, 54), (4, 89), (8, 161)])
def test_hybrid_parallelism_exchanges_the_data_of_table_2(n: int, mebibytes: float) -> None:
    parts = counted("AlexNet with groups")
    assert parts.A == 9216
    assert hybrid_nbytes(parts.P_c, parts.A, 256, n) / MIB == pytest.approx(mebibytes, rel=0.02)


def test_without_groups_the_hybrid_sizes_of_table_2_come_out_too_large() -> None:
    parts = counted("AlexNet")
    assert hybrid_nbytes(parts.P_c, parts.A, 256, 8) / MIB > 1.04 * 161


def test_weights_are_ninety_times_as_many_as_neurons() -> None:
    """Section 2.2: |W| / |N|, the neurons being what each layer computes of an image."""
    parts = counted("AlexNet with groups")
    nodes = {node.name: node for node in parts.program.graph.nodes}
    made = [parts.program.layer(layer).nodes[0] for layer in (*parts.conv, *parts.fc)]
    neurons = sum(math.prod(tensor_spec(nodes[name]).at(1)) for name in made)
    assert neurons == pytest.approx(650_000, rel=0.02)
    assert parts.P / neurons == pytest.approx(90, rel=0.05)


def test_data_grows_with_the_devices_and_the_hybrid_has_less() -> None:
    parts = counted("AlexNet with groups")
    for few, more in pairwise([2, 4, 8, 16]):
        hybrid = [hybrid_nbytes(parts.P_c, parts.A, 256, n) for n in (few, more)]
        assert hybrid[0] < hybrid[1] < data_parallel_nbytes(parts.P, more)
        assert data_parallel_nbytes(parts.P, few) < data_parallel_nbytes(parts.P, more)


# -- late-multiply -----------------------------------------------------------------------------------------------------


def test_a_layer_of_ten_thousand_by_ten_thousand_has_400_mb_of_weights() -> None:
    """Section 2.1.  At 10 Gbit/s they take 320 ms; the paper's 400 ms are those of 1 GB/s."""
    layer = Layer(M=1, N=10_000, K=10_000, n=2)
    assert reduce_broadcast_nbytes(layer) == 2 * 400e6
    assert reduce_broadcast_nbytes(layer) / 2 / 1.25e9 == pytest.approx(0.32)


@pytest.mark.parametrize(("M", "n"), list(product((2, 8, 64), (2, 3, 5))))
def test_late_multiply_moves_less_exactly_where_its_bytes_are_fewer(M: int, n: int) -> None:
    for N, K in ((64, 256), (1024, 1024), (9216, 4096), (4096, 1000), (20, 3)):
        layer = Layer(M, N, K, n)
        assert late_multiply_moves_less(layer) == (late_multiply_nbytes(layer) < reduce_broadcast_nbytes(layer))


def test_for_one_worker_nothing_moves_and_for_n_each_multiplies_n_minus_one_times_more() -> None:
    alone = Layer(M=32, N=100, K=50, n=1)
    assert reduce_broadcast_nbytes(alone) == late_multiply_nbytes(alone) == 0
    four = Layer(M=32, N=100, K=50, n=4)
    more = weight_gradient_flops(four, late=True) - weight_gradient_flops(four)
    assert more == (4 - 1) * weight_gradient_flops(four)


def test_the_fc_layers_of_alexnet_move_less_late_at_small_batches() -> None:
    parts = counted("AlexNet")
    for name in parts.fc:
        K, N = parts.program.tensors[f"{name}.weight"].shape
        assert late_multiply_moves_less(Layer(M=64, N=N, K=K, n=4))
        assert not late_multiply_moves_less(Layer(M=2048, N=N, K=K, n=4))


@pytest.mark.parametrize("n", [2, 3])
def test_the_bytes_of_algorithm_2_are_those_that_generated_programs_send(n: int) -> None:
    M, sizes = 4, (24, 40, 16, 10)
    model = MLP(sizes[0], sizes[1:-1], sizes[-1])
    given = (torch.randn(M, sizes[0]),), torch.randint(10, (M,))
    program = compiled(model, *given, F.cross_entropy, n, "late_multiply").program
    assert {p.sync for p in program.plan.placements.values()} == {"late_multiply"}
    ops = [op for rank in range(n) for op in wire(program, rank) if op.payload.what is What.LATE]
    expected = sum(late_multiply_nbytes(Layer(M, N, K, n)) for N, K in pairwise(sizes))
    assert sum(op.sent for op in ops) == expected


@pytest.mark.parametrize("wrong", [{"M": 0}, {"N": 0}, {"K": 0}, {"n": 0}])
def test_an_empty_layer_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(CostError, match="all must be >= 1"):
        Layer(**{"M": 1, "N": 1, "K": 1, "n": 1, **wrong})
