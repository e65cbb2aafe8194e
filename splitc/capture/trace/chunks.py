"""Trace a loss over chunks of the batch as one over the batch, which is computed chunk by chunk.

    for x, t in zip(h.chunk(8), target.chunk(8)):
        loss = loss + F.cross_entropy(head(x), t, reduction="sum")

is traced as a loop of one turn, whose chunk is marked, and

    cross_entropy(head(chunk_of(h, chunks=8)), chunk_of(target, chunks=8), reduction="sum")
->  linear_cross_entropy(h, head.weight, target=target, chunks=8, reduction="sum")

which computes each chunk's logits in forward, and again in backward.  Validation compares that with the whole loop.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from splitc.capture.trace.calls import Call
from splitc.capture.trace.proxy import TracedTensor
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.elementwise import is_view, keeps_features
from splitc.ir.graph import (
    arguments_of,
    called_module,
    has_examples,
    info,
    op_name,
    put_in_place,
    set_info,
    shape_of,
    tensor_spec,
)
from splitc.ir.linears import transposed_by
from splitc.ir.program import TensorSpec
from splitc.ir.torch_ops import ops_with

Values = dict[fx.Node, tuple[Any, ...]]
"""The values of the nodes of a trace, at its batch sizes."""


def chunk_of(value: Any, **how: int) -> Any:
    """Mark what stands for a chunk of a value.  how: chunks=, their number, or rows= of each."""
    return value


def chunks_in(call: Call) -> dict[str, int] | None:
    """How a call divides a tensor along its batch, as of `chunk_of`; None of any other call."""
    if (
        call.name not in ("chunk", "split")
        or call.op == "call_module"
        or type(call.args[:1] and call.args[0]) is not TracedTensor
    ):
        return None
    given = {"dim": 0, **dict(zip(("number", "dim"), call.args[1:], strict=False)), **call.kwargs}
    dim, number = given.pop("dim"), next(iter(given.values()), None)
    first, second = (value.shape for value in call.args[0]._values)
    if type(number) is not int or type(dim) is not int or first[dim] == second[dim]:
        return None
    return {"chunks" if call.name == "chunk" else "rows": number}


def join_chunks(graph: fx.Graph, root: nn.Module, values: Values) -> list[str]:
    """Make one loss of each product of a chunk and its cross entropy; sentences about them for the report.

    Raises CaptureError where more is made of a chunk than it has itself: of the whole batch no rank may hold that.
    """
    marks: dict[fx.Node, set[fx.Node]] = {}  # a value -> those of the chunks that it is made of
    for node in graph.nodes:
        own = {node} if node.target is chunk_of else set()
        if found := own.union(*(marks.get(each, ()) for each in node.all_input_nodes)):
            marks[node] = found
    losses = [node for node in marks if node.target is F.cross_entropy]
    joined = [node for node in losses if _join(graph, root, node, marks[node], values)]
    if not marks:
        return []
    most = max(map(_numbers, set[fx.Node]().union(*marks.values())))
    if not joined or any(_numbers(node) > most for node in graph.nodes if node in marks):
        raise CaptureError(f"{info(next(iter(marks))).source}: chunks of the batch are more than a loss over classes")
    for node in [node for node in marks if node.target is chunk_of]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    text = "is one loss of all chunks, whose logits are computed chunk by chunk, and again in backward."
    return [f"{node.name} ({info(node).source}) {text}" for node in joined]


def _numbers(node: fx.Node) -> int:
    return math.prod(shape_of(node)) if has_examples(node) else 0


def _join(graph: fx.Graph, root: nn.Module, node: fx.Node, marks: set[fx.Node], values: Values) -> bool:
    """Let a loss over chunks take the place of a cross entropy; whether it can."""
    logits, target = node.args
    assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
    options, between = node.kwargs, [logits]
    while op_name(between[-1]) in ops_with("cast") or is_view(between[-1]) or keeps_features(between[-1]):
        between.append(between[-1].all_input_nodes[0])
    alone = all(len(each.users) == 1 and has_examples(each) for each in between) and all(map(has_examples, marks))
    of_rows = len(shape_of(logits)) == 2 and len(shape_of(target)) == 1
    if not (alone and of_rows) or options["weight"] is not None or options["reduction"] == "mean":
        return False
    product, how = _product(root, between[-1]), _how(marks, target)
    if product is None or how is None:
        return False
    given: dict[str, Any] = {"target": target, **how, "reduction": options["reduction"]}
    usual = {"ignore_index": -100, "label_smoothing": 0.0, "dtype": tensor_spec(between[-1]).dtype}
    given |= {k: v for k, v in {**options, "dtype": tensor_spec(logits).dtype}.items() if usual.get(k, v) != v}
    with graph.inserting_before(node):
        operands = [_read(between[-1], root, each, values) if isinstance(each, str) else each for each in product]
        new = graph.call_function(comm_ops.linear_cross_entropy, tuple(operands), given)
    set_info(new, info(node))
    values[new] = values[node]
    put_in_place(graph, node, new)
    for each in between:
        graph.erase_node(each)
    return True


def _how(marks: set[fx.Node], target: fx.Node) -> dict[str, int] | None:
    """How a target, a number of each row, lies in chunks; None where its loss reads unlike ones."""
    found = set[tuple[str, float]]()
    for mark in marks:
        name, number = next(iter(mark.kwargs.items()))
        assert isinstance(number, int)
        spec = tensor_spec(mark)
        rows = shape_of(target)[0] / spec.shape[spec.batch_dim or 0]  # of sequences several
        found.add((name, number * rows if name == "rows" else number))
    (name, number), *others = found
    return {name: int(number)} if not others and number == int(number) else None


def _product(root: nn.Module, node: fx.Node) -> list[Any] | None:
    """Value, weight and bias, if there is one, of a product whose weight has no examples; names of a module's own."""
    module, name, found = called_module(root, node), op_name(node), list[Any]()
    if type(module) is nn.Linear:
        found = [*node.all_input_nodes, *(f"{node.target}.{each}" for each, _ in module.named_parameters())]
    elif node.target is F.linear:
        given = arguments_of(node, "input", "weight", "bias")
        found = [given[each] for each in ("input", "weight", "bias") if given.get(each) is not None]
    elif name in ("matmul", "mm") and (weight := transposed_by(node.args[1])) is not None:
        found = [node.args[0], weight]
    else:
        return None
    value, *weights = found
    whole = all(isinstance(each, str) or not has_examples(each) for each in weights)
    return found if whole and has_examples(value) and tensor_spec(value).batch_dim == 0 else None


def _read(call: fx.Node, root: nn.Module, name: str, values: Values) -> fx.Node:
    """A node of a parameter of the module that `call` calls."""
    node, tensor = call.graph.create_node("get_attr", name), root.get_parameter(name)
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype, None, tensor.requires_grad)
    set_info(node, info(call), spec=spec)
    values[node] = (tensor, tensor)
    return node
