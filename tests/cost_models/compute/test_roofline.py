"""Compute or memory, whichever takes longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitc.cost_models.compute.roofline import (
    achieved_flop_rate,
    layer_seconds,
    ops_seconds,
)
from splitc.errors import CostError
from splitc.ir.costs import LayerCost, OpCost
from splitc.ir.device import Device

DEVICE = Device("toy", {"float32": 100.0, "float16": 400.0}, 10.0, 1e9, {"matmul": 0.5, "memory": 0.8}, 0.01)


def cost(
    forward_flops: float = 100.0, backward_flops: float = 200.0, forward: float = 8.0, backward: float = 16.0
) -> LayerCost:
    """A layer of one op forward and two launches backward; forward, backward: bytes accessed."""
    op_class = "matmul" if forward_flops else "memory"
    ops = (
        OpCost("mm", op_class, False, forward_flops, forward),
        OpCost("mm", op_class, True, backward_flops, backward, 2),
    )
    return LayerCost(1, ops, 0.0)


COST = cost()


def test_forward_and_backward_are_bound_by_their_flops_or_by_their_memory() -> None:
    assert sum(layer_seconds(COST, DEVICE, "float32")) == pytest.approx(2 + 4 + 0.03)
    assert sum(layer_seconds(cost(forward=80.0, backward=160.0), DEVICE, "float32")) == pytest.approx(10 + 20 + 0.03)
    assert sum(layer_seconds(cost(forward=80.0), DEVICE, "float32")) == pytest.approx(10 + 4 + 0.03)


def test_a_dtype_has_its_own_rate_never_another_dtypes_and_none_where_nothing_is_computed() -> None:
    assert achieved_flop_rate(DEVICE, "float16") == 200.0
    assert sum(layer_seconds(COST, DEVICE, "float16")) == pytest.approx(1 + 2 + 0.03)
    with pytest.raises(CostError, match=r"toy has no FLOP rate for bfloat16.*splitc calibrate"):
        layer_seconds(COST, DEVICE, "bfloat16")
    lookup = cost(forward_flops=0.0, backward_flops=0.0)
    assert sum(layer_seconds(lookup, DEVICE, "bfloat16")) == pytest.approx(1 + 2 + 0.03)


# -- op by op ----------------------------------------------------------------------------------------------------------

CPU = Device(
    "a core",
    {"float32": 100.0},
    10.0,
    1e9,
    {"matmul": 0.5, "conv": 1.0, "conv_backward": 0.8, "memory": 0.8, "math": 0.4, "conv_moved": 0.2},
    0.01,
    conv_launch=0.03,
    overlap=0.0,
)
PRODUCT = OpCost("mm", "matmul", False, 100.0, 8.0)


def seconds(*ops: OpCost, device: Device = CPU) -> float:
    return ops_seconds(ops, device, "float32")


def test_a_device_that_hides_nothing_takes_the_sum_and_one_that_hides_all_the_longer() -> None:
    assert seconds(PRODUCT) == pytest.approx(2 + 1 + 0.01)
    assert seconds(PRODUCT, device=replace(CPU, overlap=1.0)) == pytest.approx(2 + 0.01)
    assert seconds(PRODUCT, device=replace(CPU, overlap=0.5)) == pytest.approx(2.5 + 0.01)


def test_what_an_op_moves_has_the_efficiency_of_its_class() -> None:
    assert seconds(OpCost("convolution", "conv", False, 100.0, 8.0)) == pytest.approx(1 + 4 + 0.01 + 0.03)
    assert seconds(OpCost("convolution_backward", "conv", True, 80.0, 8.0)) == pytest.approx(1 + 4 + 0.01 + 0.03)
    assert seconds(OpCost("relu", "memory", False, 0.0, 8.0)) == pytest.approx(1 + 0.01)
    assert seconds(OpCost("gelu", "math", True, 0.0, 8.0)) == pytest.approx(2 + 0.01)
    assert seconds(OpCost("max_pool2d", "max_pool", False, 0.0, 8.0)) == pytest.approx(1 + 0.01)


def test_a_convolution_in_float32_has_the_rate_of_tf32_and_nothing_else_has() -> None:
    modern = replace(CPU, flop_rate={"float32": 100.0, "tf32": 800.0, "bfloat16": 1600.0})
    conv = OpCost("convolution", "conv", False, 1600.0, 0.0)
    assert seconds(conv) == pytest.approx(16 + 0.04)
    assert seconds(conv, device=modern) == pytest.approx(2 + 0.04)
    assert ops_seconds([conv], modern, "bfloat16") == pytest.approx(1 + 0.04)
    assert seconds(PRODUCT, device=modern) == seconds(PRODUCT)


def test_channels_that_are_not_there_take_time_and_are_no_flops() -> None:
    op = OpCost("convolution", "conv", False, 100.0, 0.0, padding_flops=100.0)
    assert seconds(op) == pytest.approx(2 + 0.01 + 0.03)
    assert LayerCost(1, (op,), 0.0).flops == 100.0


def test_a_layer_is_the_sum_of_its_ops_each_bound_by_its_own() -> None:
    moving = OpCost("relu", "memory", False, 0.0, 80.0)
    backward = OpCost("mm", "matmul", True, 200.0, 16.0, 2)
    layer = LayerCost(1, (PRODUCT, moving, backward), 0.0)
    device = replace(CPU, overlap=1.0)
    ahead, back = layer_seconds(layer, device, "float32")
    assert ahead == pytest.approx((2 + 0.01) + (10 + 0.01))
    assert back == pytest.approx(4 + 0.02)


def test_equal_ops_cost_as_much_together_as_one_by_one() -> None:
    both = OpCost("mm", "matmul", False, 200.0, 16.0, 2)
    for overlap in (0.0, 0.3, 1.0):
        device = replace(CPU, overlap=overlap)
        assert seconds(both, device=device) == pytest.approx(seconds(PRODUCT, PRODUCT, device=device))


def test_more_work_never_takes_less_time() -> None:
    for key in ["flops", "bytes_accessed", "kernel_launches", "padding_flops"]:
        for op in (PRODUCT, OpCost("convolution", "conv", True, 10.0, 500.0)):
            for overlap in (0.0, 0.5, 1.0):
                device = replace(CPU, overlap=overlap)
                more = replace(op, **{key: 1.5 * getattr(op, key) + 1})
                assert seconds(more, device=device) >= seconds(op, device=device), key
                if overlap < 1 or key == "kernel_launches":  # else the smaller part is hidden
                    assert seconds(more, device=device) > seconds(op, device=device), key


def test_a_faster_device_never_takes_longer() -> None:
    for overlap in [0.0, 0.5, 1.0]:
        device = replace(CPU, overlap=overlap)
        ops = (PRODUCT, OpCost("convolution", "conv", True, 10.0, 500.0), OpCost("relu", "memory", False, 0.0, 80.0))
        before = seconds(*ops, device=device)
        for faster in (
            device.scaled(2),
            replace(device, launch=0.0),
            replace(device, conv_launch=0.0),
            replace(device, overlap=1.0),
            replace(device, efficiency=dict.fromkeys(device.efficiency, 1.0)),
        ):
            assert seconds(*ops, device=faster) <= before, overlap
