"""How layers can be divided over a group: by output features ("columns") or by input features ("rows")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import fx

from splitc.ir.comm_ops import linear_cross_entropy
from splitc.ir.elementwise import column_of, is_of_log_softmax, leaves_last_dim, maps_each, normaliser_of, reduction_of
from splitc.ir.graph import info, tensor_spec
from splitc.ir.linears import as_columns, as_linear, embedding_weight, is_batch_norm
from splitc.ir.program import Program, TensorSpec


@dataclass(frozen=True)
class Divisible:
    """How a layer can be divided.

    mains: the names of the values that its parameters are applied to.  outputs: its results, of those.
    splits: split -> (dimension of the weight that is divided, the state that it reads).
    features: its result can stay divided by features to the layer's end.  sums: numbers of each row that are summed
    over the ranks then.  is_loss: it ends in a loss over classes, and has no other result.
    """

    mains: frozenset[str]
    outputs: tuple[TensorSpec, ...]
    splits: Mapping[str, tuple[int, str]]
    features: bool
    sums: int
    is_loss: bool


def rows_of(spec: TensorSpec) -> int:
    """Rows of an example: all dimensions but the last."""
    return math.prod(spec.shape[:-1]) if len(spec.shape) > 1 else 1


def divisible_kinds(program: Program, divisible: frozenset[str]) -> dict[str, Divisible]:
    """How layers can be divided."""
    nodes = {node.name: node for node in program.graph.nodes}
    found = {}
    for layer in program.layers:
        if layer.name not in divisible:
            continue
        own = [nodes[name] for name in layer.nodes if nodes[name].op != "get_attr"]
        main = [node for node in own if _splits(program, node)]
        if not main or any(_splits(program, node) != _splits(program, main[0]) for node in main):
            continue
        read, outputs = [_read(program, node) for node in main], [_made(node) for node in main]
        of_inputs = any(r in own and not (maps_each(r) or leaves_last_dim(r)) for r in read)  # would be priced too low
        of_batch = all(spec.batch_dim is not None for spec in outputs)
        sums = _sums(main, own) if of_batch and not of_inputs else None
        made = frozenset(node.name for node in read), tuple(outputs), _splits(program, main[0])
        found[layer.name] = Divisible(*made, sums is not None, sums or 0, main[0].target is linear_cross_entropy)
    return found


def _made(node: fx.Node) -> TensorSpec:
    """What a node makes of its parameters; of a loss over classes the logits, which are never whole."""
    if node.target is not linear_cross_entropy:
        return tensor_spec(node)
    value, weight = map(tensor_spec, node.args[:2])
    return replace(value, shape=(*value.shape[:-1], weight.shape[0]))


def _splits(program: Program, node: fx.Node) -> dict[str, tuple[int, str]]:
    """Split -> (dimension of the weight, state that the node reads) of a node that can be divided; none else."""
    if as_linear(program, node) is not None:
        return {"columns": (0, "divided"), "rows": (1, "features")}
    if embedding_weight(program, node) is not None:
        return {"columns": (1, "replicate"), "rows": (0, "replicate")}
    if (product := as_columns(program, node)) is not None:
        return {"columns": (product.dim, "divided")}
    if is_batch_norm(program, node) and len(tensor_spec(node).shape) == 2:
        return {"columns": (0, "features")}
    return {}


def _read(program: Program, node: fx.Node) -> fx.Node:
    """The value that a node applies its parameters to."""
    linear = as_columns(program, node)
    value = linear.value if linear is not None else node.args[0] if node.args else next(iter(node.kwargs.values()))
    assert isinstance(value, fx.Node)
    return value


def _sums(mains: list[fx.Node], nodes: list[fx.Node]) -> int | None:
    """How many numbers of each row are summed over ranks that have parts of results; None if some node needs all."""
    parts = {node for node in mains if node.target is not linear_cross_entropy}
    total = 3 * (len(mains) - len(parts))
    for node in nodes:
        if parts.isdisjoint(node.all_input_nodes) or info(node).copied_to_each_stage:
            continue
        if node.target is F.cross_entropy:
            logits, target = (tensor_spec(each) for each in node.args[:2])
            of_rows = len(logits.shape) == 2 and not target.dtype.is_floating_point
            if not (of_rows and node.kwargs.get("reduction") in ("mean", "sum", "none")):
                return None
            total += 3
        elif is_of_log_softmax(node):
            total += 3
        elif name := normaliser_of(node):
            parts |= {node} if name != "logsumexp" else set()
            total += 3 * any(not is_of_log_softmax(user) for user in node.users)  # a sum in backward too
        elif maps_each(node) or leaves_last_dim(node) or ((column := column_of(node)) and column.source is not None):
            parts.add(node)
        elif column or reduction_of(node):
            total += 1
        else:
            return None
    return -(-total // len(mains))
