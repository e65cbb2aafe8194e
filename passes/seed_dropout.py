"""Give every dropout a mask that depends on seed, step, layer and examples, and not on which rank computes it.

This pass rewrites:

    dropped = F.dropout(x, p=0.5, training=True)   ->   dropped = dropout(x, 0.5, layer="classifier.0")
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.elementwise import DROPOUTS
from splitc.ir.graph import copy_graph, info, op_name, set_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import PlacedProgram

_RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "bernoulli_",
    "multinomial",
    "normal",
    "normal_",
    "uniform_",
    "exponential_",
    "rrelu",
    "gumbel_softmax",
    "poisson",
}
_PLAIN = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d}


@dataclass(frozen=True)
class SeedDropout(Pass[PlacedProgram, PlacedProgram]):
    """Replace the dropouts of the graph.  Raises CaptureError for random ops that splitc cannot seed by example."""

    name: ClassVar[str] = "seed-dropout"
    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound,)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        graph, _ = copy_graph(program.graph)
        labels: set[str] = set()
        for node in list(graph.nodes):
            if node.target in DROPOUTS:
                labels.add(label := _label(node, labels))
                _replace(graph, node, label)
            elif op_name(node) in _RANDOM or _drops_inside(node):
                raise CaptureError(
                    f"{info(node).source}: {op_name(node)} is random, and each rank would draw other numbers than one "
                    f"process does; splitc seeds F.dropout and its kin only; draw them with the data, or use those"
                )
        return replace(program, graph=graph)


def _label(node: fx.Node, taken: set[str]) -> str:
    """What the mask is drawn for: the module's path, or the node's name where the module is used again."""
    module = info(node).module
    return node.name if not module or module in taken else str(module)


def _replace(graph: fx.Graph, node: fx.Node, label: str) -> None:
    if node.target not in _PLAIN:
        raise CaptureError(f"{info(node).source}: {op_name(node)} cannot be seeded by example; use F.dropout")
    value, *rest = node.args
    p = rest[0] if rest else node.kwargs.get("p", 0.5)
    training = rest[1] if len(rest) > 1 else node.kwargs.get("training", node.kwargs.get("train", True))
    assert isinstance(value, fx.Node)
    if p == 0 or not training:
        node.replace_all_uses_with(value)
        graph.erase_node(node)
        return
    with graph.inserting_after(node):
        options: dict[str, Any] = {"layer": label}
        if DROPOUTS[node.target]:
            options["feature_dims"] = DROPOUTS[node.target]
        new = graph.call_function(comm_ops.dropout, (value, p), options)
    name = node.name
    node.replace_all_uses_with(new)
    set_info(new, info(node))
    graph.erase_node(node)
    new.name = name  # the erased node's, so it is free


def _drops_inside(node: fx.Node) -> bool:
    """Attention with a dropout of its own."""
    p = node.kwargs.get("dropout_p", 0.0)
    return isinstance(p, (int, float)) and p > 0
