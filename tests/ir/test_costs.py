"""Costs on the line through those counted at two batch sizes."""

from __future__ import annotations

from splitc.ir.costs import CostLine, LayerCost, OpCost
from tests.support.op_sums import bytes_of, flops_of


def cost(batch: int, flops: float, nbytes: float, saved: float) -> LayerCost:
    ops = (
        OpCost("addmm", "matmul", False, flops, nbytes),
        OpCost("mm", "matmul", True, 2 * flops, nbytes, kernel_launches=2.0),
        OpCost("odd", "memory", True, 0.0, nbytes, unknown=True),
    )
    return LayerCost(batch, ops, saved)


LINE = CostLine(cost(4, 400.0, 100.0, 64.0), cost(8, 800.0, 140.0, 128.0))


def test_a_line_is_exact_at_the_two_batches_that_were_counted() -> None:
    assert LINE.at(4) == LINE.small
    assert LINE.at(8) == LINE.large


def test_between_and_beyond_them_every_number_is_on_the_line() -> None:
    assert LINE.at(6) == cost(6, 600, 120, 96)
    assert LINE.at(16) == cost(16, 1600, 220, 256)


def test_no_number_falls_below_zero() -> None:
    steep = CostLine(cost(4, 100.0, 10.0, 8.0), cost(8, 800.0, 140.0, 128.0)).at(1)
    assert [op.flops for op in steep.ops] == [0.0, 0.0, 0.0] and steep.saved_bytes == 0.0


def test_forward_and_backward_add_up() -> None:
    layer = LINE.small
    assert (flops_of(layer.forward_ops), flops_of(layer.backward_ops), layer.flops) == (400.0, 800.0, 1200.0)
    assert (bytes_of(layer.forward_ops), bytes_of(layer.backward_ops)) == (100.0, 200.0)
    assert sum(op.kernel_launches for op in layer.ops) == 4.0 and layer.unknown_ops == ("odd",)
