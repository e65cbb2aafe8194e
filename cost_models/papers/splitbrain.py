"""SplitBrain's choice of the layers to divide (Lai et al., section 3.1, listing 1), and what dividing them saves.

The listing goes through a sequence of layers with `dim`, the features that a worker has of the value, and `dimF`, those
of the whole:

    linear, dim = dimF     ccr > CCR: a modulo layer, and the layer is divided by K
    linear, dim < dimF     a shard layer; ccr > CCR: the layer is divided by K
    log softmax            dim < dimF: a shard layer
    elementwise            as it stands
    conv, pooling, ...     as it stands; an error where dim < dimF

ccr is the ratio of a layer's computation to its communication.  The paper takes the operations of fprop and bprop, and
gives no formula for the other one.  Here it is the numbers that cross the two sides of a divided layer: inputs, which
must be whole, outputs, which must become so, and the gradients of both:

    ccr = 6 i o / (2 (i + o))          operations for each number, for i inputs and o outputs

Two slips of the listing are mended: line 23 sets dimF to the layer's own outputs before line 24 compares it with the
inputs' dim; and a modulo layer stands before the first divided layer only, as the text says, also where an undivided
layer lies between two divided ones.

Memory: the parameters W of a model, of which D are divided among groups of mp workers, take W - D + D / mp on each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from splitc.errors import CostError


@dataclass(frozen=True)
class Layer:
    """One layer of a sequence.

    kind: "linear", "conv" (what cannot take a part of the features: reshaping, padding and pooling too), "elementwise"
    (ReLU, dropout) or "log_softmax"; and, in what `partition` returns, "modulo" or "shard".
    inputs, outputs: features of the whole; of an elementwise layer both are left out.
    parts: among how many workers its outputs are divided.
    """

    name: str
    kind: str
    inputs: int = 0
    outputs: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "conv", "elementwise", "log_softmax", "modulo", "shard"):
            raise CostError(f"layer {self.name} is of an unknown kind, {self.kind!r}")

    @property
    def weights(self) -> int:
        """Weights of a linear layer; the paper counts no biases."""
        return self.inputs * self.outputs if self.kind == "linear" else 0


def ccr(layer: Layer) -> float:
    """Operations of fprop and bprop for each number that dividing a linear layer lets cross its sides."""
    return operations(layer) / (2 * (layer.inputs + layer.outputs))


def operations(layer: Layer) -> int:
    """Operations of fprop and bprop of a linear layer on one example, a multiply-add as two: three products."""
    return 6 * layer.inputs * layer.outputs


def partition(net: Iterable[Layer], mp: int, threshold: float) -> list[Layer]:
    """Listing 1: the net with its modulo and shard layers, and with linear layers divided among mp workers.

    threshold: CCR().  Raises CostError where a layer that cannot would get a part of the features.
    """
    transformed: list[Layer] = []
    divided = entered = False  # dim < dimF; whether there is a modulo layer
    features = 0  # dimF
    for layer in net:
        if layer.kind == "conv" and divided:
            raise CostError(
                f"layer {layer.name} cannot take the part of {features} features that {mp} workers have each; "
                f"raise the threshold, or put it before the linear layers"
            )
        if divided and layer.kind in ("linear", "log_softmax"):
            transformed.append(Layer(f"shard {layer.name}", "shard", features, features))
            divided = False
        if layer.kind == "linear":
            divided = mp > 1 and ccr(layer) > threshold
            if divided and not entered:
                transformed.append(Layer(f"modulo {layer.name}", "modulo", layer.inputs, layer.inputs))
                entered = True
            layer = replace(layer, parts=mp if divided else 1)
            features = layer.outputs
        transformed.append(layer)
    return transformed


def held(W: float, D: float, mp: int) -> float:
    """Parameters that a worker holds: W - D + D / mp."""
    return W - D + D / mp


def memory_saving(W: float, D: float, mp: int) -> float:
    """The part of the parameters' memory that groups of mp save."""
    return 1 - held(W, D, mp) / W


def divided_weights(net: Iterable[Layer]) -> int:
    """D of a transformed net."""
    return sum(layer.weights for layer in net if layer.parts > 1)
