"""Seconds of a layer on a device: the roofline, op by op.

    arithmetic = (flops + padding_flops) / (flop_rate * e[class])
    memory     = bytes_accessed / (memory_bandwidth * e[class])
    seconds    = max(arithmetic, memory) + (1 - overlap) min(arithmetic, memory) + kernel_launches * launch

summed over the ops.  e[class] is the efficiency of the op's class, forward or backward; for the memory traffic of
products it is that of "<class>_moved".  A convolution takes launch + conv_launch to start.  With overlap = 1 an op is
bound by its arithmetic or its memory traffic, whichever takes longer (Williams, Waterman and Patterson 2009); a
processor that waits for its memory before it computes takes the sum of both, overlap = 0.

A convolution in float32 has the flop_rate of "tf32" where the device has one: by default torch computes convolutions in
TF32 and matrix products not.  A program that sets either otherwise is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitc.errors import CostError
from splitc.ir.costs import LayerCost, OpCost
from splitc.ir.device import Device


def layer_seconds(cost: LayerCost, device: Device, dtype: str) -> tuple[float, float]:
    """Seconds of the forward, and of the backward, of `cost` in `dtype` ("float32").

    Raises CostError when the device has no FLOP rate for `dtype` and the layer computes.
    """
    return ops_seconds(cost.forward_ops, device, dtype), ops_seconds(cost.backward_ops, device, dtype)


def ops_seconds(ops: Iterable[OpCost], device: Device, dtype: str) -> float:
    """Seconds of ops one after the other; raises as `layer_seconds`."""
    return sum((_op_seconds(op, device, dtype) for op in ops), 0.0)


def _op_seconds(op: OpCost, device: Device, dtype: str) -> float:
    arithmetic, moving = 0.0, op.op_class
    if op.flops:
        rate = _flop_rate(device, dtype, op.op_class) * device.efficiency_of(op.op_class, op.backward)
        arithmetic, moving = (op.flops + op.padding_flops) / rate, f"{op.op_class}_moved"
    memory = op.bytes_accessed / (device.memory_bandwidth * device.efficiency_of(moving, op.backward))
    longer, shorter = max(arithmetic, memory), min(arithmetic, memory)
    launch = device.launch + (device.conv_launch if op.op_class == "conv" else 0.0)
    return longer + (1 - device.overlap) * shorter + op.kernel_launches * launch


def achieved_flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large matrix products reach in `dtype`."""
    return _flop_rate(device, dtype) * device.efficiency_of("matmul")


def _flop_rate(device: Device, dtype: str, op_class: str = "matmul") -> float:
    if op_class == "conv" and dtype == "float32" and "tf32" in device.flop_rate:
        return device.flop_rate["tf32"]
    if dtype not in device.flop_rate:
        raise CostError(
            f"device {device.name} has no FLOP rate for {dtype}, "
            f"only for {', '.join(device.flop_rate)}; "
            f"add flop_rate.{dtype} to the cluster's file, or measure it with `splitc calibrate`"
        )
    return device.flop_rate[dtype]
