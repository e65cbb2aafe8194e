"""The data sizes of Practical Lessons' table 2, and when late-multiply moves less, against what programs send."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.practical_lessons import (
    Layer,
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

# -- table 2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_ninety_times_as_many_as_neurons() -> None:
    """Section 2.2: |W| / |N|, the neurons being what each layer computes of an image."""
    parts = counted("AlexNet with groups")
    nodes = {node.name: node for node in parts.program.graph.nodes}
    made = [parts.program.layer(layer).nodes[0] for layer in (*parts.conv, *parts.fc)]
    neurons = sum(math.prod(tensor_spec(nodes[name]).at(1)) for name in made)
    assert neurons == pytest.approx(650_000, rel=0.02)
    assert parts.P / neurons == pytest.approx(90, rel=0.05)


# -- late-multiply -----------------------------------------------------------------------------------------------------


def test_late_multiply_moves_less_exactly_where_its_bytes_are_fewer() -> None:
    for M, n, (N, K) in product((2, 8, 64), (2, 3, 5), ((64, 256), (1024, 1024), (9216, 4096), (4096, 1000), (20, 3))):
        layer = Layer(M, N, K, n)
        assert late_multiply_moves_less(layer) == (late_multiply_nbytes(layer) < reduce_broadcast_nbytes(layer))


def test_for_one_worker_nothing_moves_and_for_n_each_multiplies_n_minus_one_times_more() -> None:
    alone = Layer(M=32, N=100, K=50, n=1)
    assert reduce_broadcast_nbytes(alone) == late_multiply_nbytes(alone) == 0
    four = Layer(M=32, N=100, K=50, n=4)
    more = weight_gradient_flops(four, late=True) - weight_gradient_flops(four)
    assert more == (4 - 1) * weight_gradient_flops(four)


@pytest.mark.slow
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


def test_an_empty_layer_is_refused() -> None:
    for wrong in "MNKn":
        with pytest.raises(CostError, match="all must be >= 1"):
            Layer(**{"M": 1, "N": 1, "K": 1, "n": 1, wrong: 0})
