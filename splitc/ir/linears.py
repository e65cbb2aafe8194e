"""Find linear layers and embeddings, as modules or functions, and make their parameters nodes.

fc6 = self.classifier.1(x)     ->     weight = self.classifier.1.weight; bias = self.classifier.1.bias
fc6 = linear(x, weight, bias)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.ir.graph import (
    arguments_of,
    called_module,
    info,
    put_in_place,
    set_info,
    shape_of,
    tensor_spec,
    tensors_of_node,
)
from splitc.ir.layers import Layer
from splitc.ir.program import Program, TensorSpec


@dataclass(frozen=True)
class Linear:
    """A linear layer, y = x W^T + b.

    weight: (out_features, in_features); weight, bias: the names of the parameters in the graph.
    """

    node: fx.Node
    value: fx.Node
    weight: str
    bias: str | None


def as_linear(program: Program, node: fx.Node) -> Linear | None:
    """`node` as a linear layer; None when it is none, or when its weight is computed."""
    if (module := called_module(program.root, node)) is not None:
        read = node.args[0] if len(node.args) == 1 and not node.kwargs else None
        if type(module) is not nn.Linear or not isinstance(read, fx.Node):
            return None
        bias_name = None if module.bias is None else f"{node.target}.bias"
        return Linear(node, read, f"{node.target}.weight", bias_name)
    if node.target is not F.linear:
        return None
    value, weight, bias = _operands(node)
    parameters = {alias for h in program.tensors.values() if h.parameter for alias in (h.name, *h.names)}
    given = [weight] if bias is None else [weight, bias]
    if not all(isinstance(each, fx.Node) and each.op == "get_attr" and each.target in parameters for each in given):
        return None
    return Linear(node, value, str(weight.target), None if bias is None else str(bias.target))


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of an F.linear node."""
    given = arguments_of(node, "input", "weight", "bias")
    return given["input"], given["weight"], given.get("bias")


def linear_layers(program: Program) -> dict[str, tuple[Linear, ...]]:
    """The layers whose parameters only linear nodes read, and which share none with another layer -> these nodes."""
    nodes = {node.name: node for node in program.graph.nodes}
    alone = [layer for layer in program.layers if all(program.users[name] == 1 for name in layer.tensors)]
    return {layer.name: uses for layer in alone if (uses := _uses(program, layer, nodes))}


def _uses(program: Program, layer: Layer, nodes: dict[str, fx.Node]) -> tuple[Linear, ...]:
    """The linear nodes of a layer; none when another node reads one of its parameters or buffers."""
    uses: list[Linear] = []
    for name in layer.nodes:
        node = nodes[name]
        reads = [n for n in node.all_input_nodes if n.op == "get_attr" and not info(n).copied_to_each_stage]
        module = called_module(program.root, node)
        if module is None and isinstance(info(node).spec, TensorSpec) and not tensor_spec(node).requires_grad:
            continue  # a moving average of the weight, say
        if not (reads if module is None else any(True for _ in module.parameters())):
            continue
        linear = as_linear(program, node)
        if linear is None or not _is_batch_first(linear.value):
            return ()
        uses.append(linear)
    return tuple(uses)


def _is_batch_first(value: fx.Node) -> bool:
    """Whether the batch is the first dim of a value that has further dims."""
    spec = info(value).spec
    return isinstance(spec, TensorSpec) and spec.batch_dim == 0 and len(spec.shape) > 1


def parameter_nodes(graph: fx.Graph, linear: Linear) -> tuple[fx.Node, fx.Node | None]:
    """The nodes of weight and bias; they are created before a layer that is a module."""
    if linear.node.op != "call_module":
        return _operands(linear.node)[1:]
    weight = _parameter(graph, linear.node, linear.weight)
    return weight, None if linear.bias is None else _parameter(graph, linear.node, linear.bias)


def _parameter(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    """A node of a parameter of the module that `node` calls."""
    with graph.inserting_before(node):
        attribute = graph.create_node("get_attr", name)
    set_info(attribute, info(node), spec=None, copied_to_each_stage=False, of_module=True, state=None, shards={})
    return attribute


def call_as_function(program: Program, graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Replace the call of a linear or embedding module by a function of its parameters; None for other modules."""
    module = program.root.get_submodule(str(node.target))
    if type(module) not in (nn.Linear, nn.Embedding):
        return None
    parameters = [_parameter(graph, node, f"{node.target}.{name}") for name, _ in module.named_parameters()]
    options: dict[str, Any] = {"padding_idx": module.padding_idx} if isinstance(module, nn.Embedding) else {}
    with graph.inserting_before(node):
        function = F.embedding if options else F.linear
        new = graph.call_function(function, (node.all_input_nodes[0], *parameters), options)
    set_info(new, info(node))
    put_in_place(graph, node, new)
    return new


def embedding_weight(program: Program, node: fx.Node) -> str | None:
    """The parameter of a node that looks up rows of an embedding; None for any other node."""
    if isinstance(called_module(program.root, node), nn.Embedding | nn.EmbeddingBag):
        return f"{node.target}.weight"
    if node.target not in (F.embedding, F.embedding_bag):
        return None
    weight = arguments_of(node, "input", "weight")["weight"]
    return str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else None


def divisible_layers(program: Program) -> frozenset[str]:
    """The layers whose parameters only linear layers, embeddings and normalisations of (N, D) over examples read."""
    others = {
        name
        for node in program.graph.nodes
        if node.op.startswith("call")
        and not (as_linear(program, node) or embedding_weight(program, node))
        and not (is_batch_norm(program, node) and len(shape_of(node)) == 2)
        for name in tensors_of_node(program, node)
    }
    own = {layer.name: {n for n in layer.tensors if program.tensors[n].parameter} for layer in program.layers}
    return frozenset(layer for layer, names in own.items() if names and names.isdisjoint(others))


def is_batch_norm(program: Program, node: fx.Node) -> bool:
    """Whether a node is a module that normalises over examples."""
    return isinstance(called_module(program.root, node), _BatchNorm)
