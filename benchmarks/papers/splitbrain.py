"""Choose the layers to shard as SplitBrain does (Lai et al., section 3.1, listing 1), and price the memory it saves.

The listing walks a sequence of layers with `dim`, the number of features that a worker has of a value, and `dimF`, the
number of all its features:

    linear, dim = dimF     ccr > CCR: a modulo layer, and the layer is divided by K
    linear, dim < dimF     a shard layer; ccr > CCR: the layer is divided by K
    log softmax            dim < dimF: a shard layer
    elementwise            as it stands
    conv, pooling, ...     as it stands; an error where dim < dimF

ccr is a layer's ratio of computation to communication.  The paper counts the operations of fprop and bprop, and gives
no formula for the communication.  Here it is the numbers that cross both sides of a sharded layer: its inputs and its
outputs, which are gathered, and the gradients of both:

    ccr = 6 i o / (2 (i + o))          operations for each number, for i inputs and o outputs

Two slips of the listing are corrected: line 23 sets dimF to the layer's own outputs before line 24 compares it with the
inputs' dim; and only the first sharded layer gets a modulo layer, as the text says, also where an unsharded layer lies
between two sharded ones.

Memory: a model with W parameters, of which D are sharded over groups of mp workers, takes W - D + D / mp on each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from splitc.errors import CostError


@dataclass(frozen=True)
class Layer:
    """One layer of a sequence.

    kind: "linear", "conv" (any layer that needs all features: reshape, padding and pooling too), "elementwise" (ReLU,
    dropout) or "log_softmax"; in the result of `partition` also "modulo" or "shard".
    inputs, outputs: number of all features; 0 for an elementwise layer.
    parts: number of workers over which its outputs are sharded.
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
    """Operations of fprop and bprop for each number communicated when a linear layer is sharded."""
    return operations(layer) / (2 * (layer.inputs + layer.outputs))


def operations(layer: Layer) -> int:
    """Operations of a linear layer on one example: three matrix products in fprop and bprop, a multiply-add as two."""
    return 6 * layer.inputs * layer.outputs


def partition(net: Iterable[Layer], mp: int, threshold: float) -> list[Layer]:
    """Insert modulo and shard layers and shard linear layers over mp workers (listing 1).

    threshold: CCR().  Raises CostError where a layer that needs all features would get a shard.
    """
    transformed: list[Layer] = []
    divided = entered = False  # dim < dimF; whether the modulo layer is inserted
    features = 0  # dimF
    for layer in net:
        if layer.kind == "conv" and divided:
            raise CostError(
                f"layer {layer.name} needs all {features} features, which are sharded over {mp} workers; raise the "
                f"threshold, or put it before the linear layers"
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
    """Parameters on each worker: W - D + D / mp."""
    return W - D + D / mp


def memory_saving(W: float, D: float, mp: int) -> float:
    """Fraction of the parameter memory that groups of mp workers save."""
    return 1 - held(W, D, mp) / W


def divided_weights(net: Iterable[Layer]) -> int:
    """D: sharded weights of a transformed net."""
    return sum(layer.weights for layer in net if layer.parts > 1)
