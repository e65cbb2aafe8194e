"""Seconds of a layer on a device: the roofline, op by op.

    arithmetic = (flops + filling) / (flop_rate * e[class])
    memory     = moved / (memory_bandwidth * e[class])
    seconds    = max(arithmetic, memory) + (1 - overlap) min(arithmetic, memory) + launches * launch

summed over the ops; e is the efficiency of the op's class, forward or backward, and of what products move that of
"<class>_moved".  Convolutions launch in launch + conv_launch.  An op is bound by its arithmetic or by its memory,
whichever takes longer (Williams, Waterman and Patterson 2009), where overlap = 1; a processor that waits for its memory
before it computes takes the sum of both.

A layer that was measured (`splitc.cost_models.profiling.measured`) takes what it took, at the device's speed:

    seconds = measured seconds * flop rate there and then / (flop_rate * e_matmul)       both of float32
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from splitc.errors import CostError
from splitc.ir.cluster import Device
from splitc.ir.costs import LayerCost, OpCost


def layer_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of forward and backward of `cost` in `dtype` ("float32").

    Raises CostError when the device has no FLOP rate for `dtype` and the layer computes.
    """
    return forward_seconds(cost, device, dtype) + backward_seconds(cost, device, dtype)


def forward_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of a layer's forward; raises as `layer_seconds`."""
    if cost.measured is not None:
        return cost.measured.forward * cost.measured.flop_rate / achieved_flop_rate(device, "float32")
    return ops_seconds((op for op in _ops(cost) if not op.backward), device, dtype)


def backward_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of a layer's backward; raises as `layer_seconds`."""
    if cost.measured is not None:
        return cost.measured.backward * cost.measured.flop_rate / achieved_flop_rate(device, "float32")
    return ops_seconds((op for op in _ops(cost) if op.backward), device, dtype)


def ops_seconds(ops: Iterable[OpCost], device: Device, dtype: str) -> float:
    """Seconds of ops one after the other; raises as `layer_seconds`."""
    return sum(_op_seconds(op, device, dtype) for op in ops)


def _op_seconds(op: OpCost, device: Device, dtype: str) -> float:
    arithmetic, moving = 0.0, op.op_class
    if op.flops:
        rate = _flop_rate(device, dtype) * device.reached(op.op_class, op.backward)
        arithmetic, moving = (op.flops + op.padding_flops) / rate, f"{op.op_class}_moved"
    memory = op.bytes_accessed / (device.memory_bandwidth * device.reached(moving, op.backward))
    longer, shorter = max(arithmetic, memory), min(arithmetic, memory)
    launch = device.launch + (device.conv_launch if op.op_class == "conv" else 0.0)
    return longer + (1 - device.overlap) * shorter + op.kernel_launches * launch


def _ops(cost: LayerCost) -> tuple[OpCost, ...]:
    """The ops of a layer; of one whose ops are not known a product forward, and one backward."""
    if cost.ops:
        return cost.ops
    forward = cost.forward_flops, cost.forward_bytes_accessed, cost.kernel_launches / 3
    backward = cost.backward_flops, cost.backward_bytes_accessed, cost.kernel_launches * 2 / 3
    return tuple(
        OpCost("layer", "matmul" if numbers[0] else "memory", back, *numbers)
        for back, numbers in ((False, forward), (True, backward))
    )


def priced(cost: LayerCost, device: Device, dtype: str) -> LayerCost:
    """`cost` with its seconds on `device` filled in."""
    return replace(cost, seconds=layer_seconds(cost, device, dtype))


def achieved_flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large matrix products reach in `dtype`."""
    return _flop_rate(device, dtype) * device.reached("matmul")


def _flop_rate(device: Device, dtype: str) -> float:
    if dtype not in device.flop_rate:
        raise CostError(
            f"device {device.name} has no FLOP rate for {dtype}, "
            f"only for {', '.join(device.flop_rate)}; "
            f"add flop_rate.{dtype} to the cluster's file, or measure it with `splitc calibrate`"
        )
    return device.flop_rate[dtype]
