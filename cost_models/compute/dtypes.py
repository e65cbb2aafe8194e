"""The dtype that each layer computes in: what its FLOPs are priced with."""

from __future__ import annotations

import torch

from splitc.ir.device import Device
from splitc.ir.graph import info
from splitc.ir.program import Program, TensorSpec


def layer_dtypes(program: Program, device: Device) -> dict[str, str]:
    """Layer -> the dtype it computes in: autocast's where values of the layer have it, else its parameters'.

    A layer without parameters has its values'.  A device without a rate for autocast's dtype gains nothing by it:
    its layers are priced in their parameters'.
    """
    autocast, rates = program.autocast, device.flop_rate
    nodes = {node.name: node for node in program.graph.nodes}
    found = {}
    for layer in program.layers:
        specs = [info(nodes[name]).spec for name in layer.nodes if name in nodes]  # some may be rewritten
        values = [spec.dtype for spec in specs if isinstance(spec, TensorSpec)]
        dtypes = [program.tensors[name].dtype for name in layer.tensors] + values
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        if autocast in values and str(autocast).removeprefix("torch.") in rates:
            floating.insert(0, autocast)
        found[layer.name] = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    return found
