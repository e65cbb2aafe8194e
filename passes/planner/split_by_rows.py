"""Divide a sharded layer by rows if its input is sharded anyway.

    fc6 (columns) -> relu -> fc7 (rows)      fc7 reads the shards of fc6, and its partial products are summed

Gathering i features forward, scattering their gradients backward and gathering o features moves 2 i + o; summing o
forward, with the identity backward, moves 2 o.  So rows are chosen where 2 o < 2 i + o.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from splitc.ir.elementwise import is_elementwise
from splitc.ir.graph import tensor_spec
from splitc.ir.linears import Linear
from splitc.passes.planner.assign_roles import LayerChoice
from splitc.passes.planner.request import Request


def split_by_rows(request: Request, choices: Mapping[str, LayerChoice]) -> dict[str, LayerChoice]:
    """The choices, with layers divided by rows where that is cheaper; where a pin asks for it they are already."""
    divided = dict(choices)
    linears = request.linears
    layer_of_output = {uses[0].node: layer for layer, uses in linears.items() if len(uses) == 1}
    for layer, uses in linears.items():
        if divided[layer].holding != "sharded":
            continue
        pin = request.pins.get(layer)
        source = _through_elementwise(uses[0]) if len(uses) == 1 else None
        before = layer_of_output.get(source) if source is not None else None
        if source is None or before is None or (pin is not None and pin.split):
            continue
        feeds = (divided[before].split, divided[before].state) == ("columns", None)
        features_in, features_out = (tensor_spec(node).shape[-1] for node in (source, uses[0].node))
        if (
            feeds
            and divided[before].place == divided[layer].place
            and 2 * features_out < 2 * features_in + features_out
        ):
            divided[layer] = replace(divided[layer], split="rows")
    return divided


def _through_elementwise(linear: Linear) -> fx.Node | None:
    """The node whose shards a linear layer would read: above elementwise nodes that have no other reader."""
    node = linear.value
    while len(node.users) == 1:
        tensors = node.all_input_nodes
        if not is_elementwise(node):
            return node
        if len(tensors) != 1:
            return None
        (node,) = tensors
    return None
