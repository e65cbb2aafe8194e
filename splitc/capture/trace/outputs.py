"""Find what the model returns beside its loss: the values that `worker.predict` gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from splitc.capture.trace.batch_dims import require_whole_batch
from splitc.capture.trace.proxy import is_proxy
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, has_examples, info, set_info, update_info
from splitc.ir.program import Program, Refusal, TensorSpec
from splitc.ir.regions import names_in
from splitc.runtime.nested import parts


def mark(graph: fx.Graph, value: Any) -> None:
    """Add a node that keeps what the model returned, nested as it is; objects become dicts by field."""
    update_info(graph.call_function(comm_ops.returned, (_nested(value),)), source="output", side_effect=True)


def _nested(value: Any) -> Any:
    if is_proxy(value):
        return value._node
    held = parts(value)
    if held is None:
        return value if isinstance(value, (int, float, str)) else None
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_nested, value)) if type(value) in (list, tuple) else tuple(map(_nested, value))
    return {key: _nested(part) for key, part in held.items()}


def taken(graph: fx.Graph) -> fx.Graph:
    """Move the node of `mark` into a copy of the graph, of which it is the output."""
    (mine,) = graph.find_nodes(op="call_function", target=comm_ops.returned)
    copied, nodes = copy_graph(graph)
    graph.erase_node(mine)
    copied.output_node().args = (nodes[mine],)
    update_info(nodes[mine], side_effect=False)
    return copied


def outputs_of(program: Program, graph: fx.Graph) -> Program | Refusal:
    """The program of what the model returns, each tensor with a batch dimension.

    graph: of `taken`.  What depends on tensors that the loss does not depend on is left out: no rank has them.
    """
    marked = graph.output_node().args[0]
    assert isinstance(marked, fx.Node)
    kept: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        kept[node] = _is_held(program, node) and all(kept[value] for value in node.all_input_nodes)
    marked.args = (fx.node.map_arg(marked.args[0], lambda node: node if kept[node] and has_examples(node) else None),)
    if not marked.all_input_nodes:
        return Refusal("the model returns nothing but its loss, or nothing of which each example has its own part")
    graph.eliminate_dead_code(lambda node: node.op == "output")
    try:
        require_whole_batch(graph)
    except CaptureError as error:
        return Refusal(str(error))
    for node in graph.nodes:
        if isinstance(spec := info(node).spec, TensorSpec):
            set_info(node, info(node), spec=replace(spec, requires_grad=False))
    read = {node.target for node in graph.find_nodes(op="placeholder")}
    inputs = tuple(each for each in program.inputs if each.name in read)
    return replace(program, graph=graph, inputs=inputs, loss_terms=(), coupled=())


def _is_held(program: Program, node: fx.Node) -> bool:
    """Whether all tensors that a node reads are those of the step."""
    if node.op == "get_attr":
        return str(node.target) in program.first_names or info(node).is_module
    return node.op != "call_module" or program.first_names.keys() >= set(names_in(program.root, str(node.target)))
