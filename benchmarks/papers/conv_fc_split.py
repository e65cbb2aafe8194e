"""Describe a captured model as the papers do: convolutional layers followed by fully connected ones.

Counts the inputs of their equations: parameters, activations that cross from the conv to the fc layers, FLOPs, saved
activations, and seconds on a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from splitc.cost_models.compute.roofline import layer_seconds
from splitc.errors import CostError
from splitc.ir.device import Device
from splitc.ir.graph import info
from splitc.ir.linears import linear_layers
from splitc.ir.program import Program, TensorSpec


@dataclass(frozen=True)
class ConvFcSplit:
    """The conv and fc layers of an analysed `program`; made by `conv_fc_split`."""

    program: Program
    conv: tuple[str, ...]
    fc: tuple[str, ...]

    @property
    def P(self) -> int:
        """Parameters of the model."""
        return self.parameters((*self.conv, *self.fc))

    @property
    def P_c(self) -> int:
        """Parameters of the conv layers."""
        return self.parameters(self.conv)

    @property
    def A(self) -> int:
        """Activations that enter the fc layers for one example, counted after the last pooling."""
        layer_of = self.program.layer_of
        crossing = {
            value
            for value, reader in self.program.edges()
            if layer_of.get(value.name) in self.conv and layer_of.get(reader.name) in self.fc
        }
        specs = [info(value).spec for value in crossing]
        return sum(math.prod(spec.at(1)) for spec in specs if isinstance(spec, TensorSpec))

    def parameters(self, layers: Iterable[str]) -> int:
        """Count the trainable parameters of `layers`."""
        names = dict.fromkeys(name for layer in layers for name in self.program.layer(layer).tensors)
        return sum(self.program.tensors[name].numel for name in names if self.program.tensors[name].trainable)

    def forward_flops(self, layers: Iterable[str]) -> float:
        """FLOPs of forward for one example; a multiply-add counts two."""
        return sum(op.flops for layer in layers for op in self.program.costs[layer].at(1).forward_ops)

    def saved_nbytes(self, layers: Iterable[str], batch: int) -> float:
        """Bytes of activations that `layers` save for backward."""
        return sum(self.program.costs[layer].at(batch).saved_bytes for layer in layers)

    def seconds(self, layers: Iterable[str], batch: int, device: Device, dtype: str = "float32") -> float:
        """Seconds of forward and backward.  Raises CostError if the device has no rate for `dtype`."""
        return sum(sum(layer_seconds(self.program.costs[layer].at(batch), device, dtype)) for layer in layers)


def conv_fc_split(program: Program, fc: Collection[str] | None = None) -> ConvFcSplit:
    """Split the layers of an analysed program.  fc: names of the fc layers; None: all linear layers.

    Raises CostError if either part is empty.
    """
    layers = [layer.name for layer in program.layers]
    upper = set(linear_layers(program) if fc is None else fc)
    split = ConvFcSplit(
        program,
        conv=tuple(layer for layer in layers if layer not in upper),
        fc=tuple(layer for layer in layers if layer in upper),
    )
    if not split.conv or not split.fc:
        raise CostError(
            f"{program.name}: {len(split.fc)} of {len(layers)} layers are fully connected, {len(split.conv)} are not; "
            f"the papers' models need both; name the fc layers"
        )
    return split
