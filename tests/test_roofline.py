"""Compute or memory, whichever takes longer."""

from dataclasses import replace

import pytest

from cost_models.roofline import achieved_flop_rate, layer_seconds, priced
from splitc.cluster import Device
from splitc.errors import CostError
from splitc.program import LayerCost

DEVICE = Device("toy", {"float32": 100.0, "float16": 400.0}, 10.0, 1e9, {"matmul": 0.5, "memory": 0.8}, 0.01)
COST = LayerCost(1, 100.0, 200.0, 8.0, 16.0, 0.0, launches=3)


def test_a_layer_that_computes_much_is_bound_by_its_flops():
    assert layer_seconds(COST, DEVICE, "float32") == pytest.approx(2 + 4 + 0.03)


def test_a_layer_that_moves_much_is_bound_by_its_memory():
    cost = replace(COST, forward_moved=80.0, backward_moved=160.0)
    assert layer_seconds(cost, DEVICE, "float32") == pytest.approx(10 + 20 + 0.03)


def test_forward_and_backward_are_bound_each_by_its_own():
    cost = replace(COST, forward_moved=80.0)
    assert layer_seconds(cost, DEVICE, "float32") == pytest.approx(10 + 4 + 0.03)


def test_a_smaller_dtype_computes_at_its_own_rate():
    assert achieved_flop_rate(DEVICE, "float16") == 200.0
    assert layer_seconds(COST, DEVICE, "float16") == pytest.approx(1 + 2 + 0.03)


def test_priced_fills_in_the_seconds_and_nothing_else():
    assert priced(COST, DEVICE, "float32") == replace(COST, seconds=pytest.approx(6.03))


def test_a_dtype_without_a_rate_is_an_error_and_never_another_dtypes_rate():
    with pytest.raises(CostError, match=r"toy has no FLOP rate for bfloat16.*splitc calibrate"):
        layer_seconds(COST, DEVICE, "bfloat16")


def test_a_layer_that_computes_nothing_needs_no_flop_rate():
    lookup = replace(COST, forward_flops=0.0, backward_flops=0.0)
    assert layer_seconds(lookup, DEVICE, "bfloat16") == pytest.approx(1 + 2 + 0.03)
