"""Seconds of a layer on a device: the roofline.

    seconds = max(flops / (flop_rate * e_matmul), moved / (memory_bandwidth * e_memory))
              + launches * launch

with one maximum for forward and one for backward; `launches` are those of both.

A layer that was measured (`cost_models.measured`) takes what it took, at the device's speed:

    seconds = measured seconds * flop rate there and then / (flop_rate * e_matmul)       both of float32

An op is bound by its arithmetic or by its memory, whichever takes longer (Williams, Waterman and
Patterson 2009).
"""

from __future__ import annotations

from dataclasses import replace

from splitc.cluster import Device
from splitc.errors import CostError
from splitc.program import LayerCost


def layer_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of forward and backward of `cost` in `dtype` ("float32").

    Raises CostError when the device has no FLOP rate for `dtype` and the layer computes.
    """
    return forward_seconds(cost, device, dtype) + backward_seconds(cost, device, dtype)


def forward_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of a layer's forward; raises as `layer_seconds`."""
    if cost.measured is not None:
        return cost.measured.forward * cost.measured.flop_rate / achieved_flop_rate(device, "float32")
    return _seconds(cost.forward_flops, cost.forward_moved, cost.launches / 3, device, dtype)


def backward_seconds(cost: LayerCost, device: Device, dtype: str) -> float:
    """Seconds of a layer's backward; raises as `layer_seconds`."""
    if cost.measured is not None:
        return cost.measured.backward * cost.measured.flop_rate / achieved_flop_rate(device, "float32")
    return _seconds(cost.backward_flops, cost.backward_moved, cost.launches * 2 / 3, device, dtype)


def _seconds(flops: float, moved: float, launches: float, device: Device, dtype: str) -> float:
    arithmetic = flops / achieved_flop_rate(device, dtype) if flops else 0.0
    memory = moved / (device.memory_bandwidth * device.efficiency["memory"])
    return max(arithmetic, memory) + launches * device.launch


def priced(cost: LayerCost, device: Device, dtype: str) -> LayerCost:
    """`cost` with its seconds on `device` filled in."""
    return replace(cost, seconds=layer_seconds(cost, device, dtype))


def achieved_flop_rate(device: Device, dtype: str) -> float:
    """FLOP/s that large matrix products reach in `dtype`."""
    if dtype not in device.flop_rate:
        raise CostError(
            f"device {device.name} has no FLOP rate for {dtype}, "
            f"only for {', '.join(device.flop_rate)}; "
            f"add flop_rate.{dtype} to the cluster's file, or measure it with `splitc calibrate`"
        )
    return device.flop_rate[dtype] * device.efficiency["matmul"]
