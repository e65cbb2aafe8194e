"""Costs on the line through those counted at two batch sizes."""

from __future__ import annotations

from splitc.ir.costs import CostLine, LayerCost, OpCost


def cost(batch: int, flops: float, nbytes: float, saved: float) -> LayerCost:
    ops = (
        OpCost("addmm", "matmul", False, flops, nbytes),
        OpCost("mm", "matmul", True, 2 * flops, nbytes, kernel_launches=2.0),
        OpCost("odd", "memory", True, 0.0, nbytes, unknown=True),
    )
    return LayerCost(batch, ops, saved)


LINE = CostLine(cost(4, 400.0, 100.0, 64.0), cost(8, 800.0, 140.0, 128.0))


def test_every_number_is_on_the_line_through_the_two_batches_that_were_counted_and_none_below_zero() -> None:
    assert LINE.at(4) == LINE.small and LINE.at(8) == LINE.large
    assert LINE.at(6) == cost(6, 600, 120, 96)
    assert LINE.at(16) == cost(16, 1600, 220, 256)
    steep = CostLine(cost(4, 100.0, 10.0, 8.0), cost(8, 800.0, 140.0, 128.0)).at(1)
    assert [op.flops for op in steep.ops] == [0.0, 0.0, 0.0] and steep.saved_bytes == 0.0
