"""Group the nodes of a graph into layers.

A layer is a node that owns parameters, with the parameterless nodes that follow it: a parameterless node joins the
topologically last layer it depends on, or, if it depends on inputs alone, the layer of its first reader.  So a max-pool
after the last convolution is part of that layer, and a cut after it sends the pooled activations.  A mean over the
batch joins the layer of its first reader: it has no examples that a cut could send.

Nodes that any stage can compute by itself (sizes, constants, masks made of them) are marked `copied_to_each_stage`:
every role that reads one has its own copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from splitc.capture.in_batch import LAYER, in_batch_nodes
from splitc.ir.comm_ops import store_buffer
from splitc.ir.graph import changes_statistics, has_examples, info, tensors_of_node, update_info
from splitc.ir.layers import Layer
from splitc.ir.program import Program, SizeSpec, TensorSpec


def group_layers(program: Program, in_batch: Collection[fx.Node] = (), known: Collection[str] = ()) -> dict[str, Any]:
    """The fields `layers`, `frozen_layers` and `in_batch` of the program; sets the layer of every node.

    in_batch: nodes that need the whole global batch, all that reads them included; they are the last layer.
    known: all layers that there may be, in order; none: those that the graph has.
    """
    parameters = {alias for t in program.tensors.values() if t.parameter for alias in t.all_names}
    order: dict[str, int] = {}  # layer -> its place
    labels: dict[str, list[str]] = defaultdict(list)  # module -> its layers
    members: list[list[fx.Node]] = []
    index: dict[fx.Node, int] = {}
    waiting: dict[fx.Node, None] = {}  # depend on inputs alone, and have no reader yet

    def place(name: str) -> int:
        if name not in order:
            order[name] = len(order)
            labels[name.split("#")[0]].append(name)
            members.append([])
        return order[name]

    def join(node: fx.Node, k: int) -> None:
        """Put a node into the k-th layer, and the waiting nodes that it depends on."""
        members[k].append(node)
        index[node] = k
        for value in node.all_input_nodes:
            if value in waiting:
                del waiting[value]
                join(value, k)

    for name in known:
        place(name)
    changing = (n for n in program.graph.nodes if n.op == "call_module" or changes_statistics(n))
    _mark_copied(program.graph, parameters.union(*(tensors_of_node(program, node) for node in changing)))
    last = _unused(program, LAYER) if in_batch else ""
    for node in sorted(program.graph.nodes, key=lambda node: node in in_batch):  # stable
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        owner = None if node in in_batch else _owner(program, node, parameters)
        below = max((index[n] for n in node.all_input_nodes if n in index), default=None)
        label = last if node in in_batch else None
        if owner is not None:
            label = _label(owner, labels[owner], order, below or 0, known=bool(known))
        if label is None and below is None:
            waiting[node] = None
            continue
        join(node, place(label) if label is not None else below or 0)
    if waiting:  # no layer reads them
        k = place(next(iter(order), None) or _first_owner(program, parameters))
        members[k].extend(waiting)
        index.update(dict.fromkeys(waiting, k))
    if not in_batch:
        _join_readers(_summed(program.graph), members, index)
    for node in program.graph.nodes:  # a parameter or buffer belongs to the first layer that reads it
        if node.op == "get_attr" and node.users:
            members[min(index[user] for user in node.users if user in index)].append(node)
    sequence = {node: i for i, node in enumerate(program.graph.nodes)}
    in_order = {name: sorted(members[k], key=sequence.__getitem__) for name, k in order.items() if members[k]}
    layers = tuple(_layer(program, name, nodes, parameters) for name, nodes in in_order.items())
    frozen = tuple(layer.name for layer in layers if _is_frozen(program, layer))
    return {"layers": layers, "frozen_layers": frozen, "in_batch": last}


def gather_coupled(program: Program, known: Collection[str] = ()) -> Program:
    """The program with one layer of all that needs the whole batch, where examples are coupled.  known: all layers."""
    if not program.coupled:
        return program
    names = {each.node for each in program.coupled}
    nodes = in_batch_nodes(program, [node for node in program.graph.nodes if node.name in names])
    grouped = group_layers(program, nodes, known)
    layers, trained = grouped["layers"], {name for name, tensor in program.tensors.items() if tensor.trainable}
    is_all = all(layer.name == grouped["in_batch"] or trained.isdisjoint(layer.tensors) for layer in layers)
    gain = " All that trains is in it, so several ranks gain nothing over one: let a module of its own hold the line."
    note = f"{grouped['in_batch']} runs where the whole batch is: {program.coupled[0].why}.{gain if is_all else ''}"
    return replace(program, **grouped, notes=(*program.notes, note))


def _summed(graph: fx.Graph) -> list[fx.Node]:
    """What is made of values with examples alone, and has none itself: no role could send it to another one."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        read = [each for each in node.all_input_nodes if not info(each).copied_to_each_stage]
        is_plain = node.op in ("call_function", "call_method") and not info(node).side_effect
        of_data = bool(read) and all(has_examples(each) or each in found for each in read)
        if is_plain and of_data and isinstance(info(node).spec, TensorSpec) and not has_examples(node):
            found[node] = None
    return [*found]


def _join_readers(nodes: list[fx.Node], members: list[list[fx.Node]], index: dict[fx.Node, int]) -> None:
    """Move each node to the layer of its first reader, where that is a later one."""
    for node in reversed(nodes):
        if (readers := [index[user] for user in node.users if user in index]) and min(readers) > index[node]:
            members[index[node]].remove(node)
            index[node] = min(readers)
            members[index[node]].append(node)


def _unused(program: Program, name: str) -> str:
    """`name`, or a longer one where a module of the model has it."""
    while any(path.split(".")[0] == name for path, _ in program.root.named_modules()):
        name += "_loss"
    return name


def _owner(program: Program, node: fx.Node, parameters: set[str]) -> str | None:
    """The module whose parameters the node reads, if any."""
    if node.op == "call_module":
        module = program.root.get_submodule(str(node.target))
        return str(node.target) or "model" if any(True for _ in module.parameters()) else None
    if info(node).side_effect and any(name.startswith(f"{info(node).module}.") for name in parameters):
        return str(info(node).module)  # a counter belongs to its module
    for value in node.all_input_nodes:
        if value.op == "get_attr" and value.target in parameters:
            return str(value.target).rpartition(".")[0] or str(value.target)
    return None


def _label(name: str, labels: list[str], order: Mapping[str, int], before: int, known: bool) -> str | None:
    """The label of a node of a module: a new one, `name#2`, where it depends on layers after the module's last.

    labels: those that the module has.  known: it must be one of them; None where none is late enough.
    """
    if known:
        return next((label for label in labels if order[label] >= before), None)
    if labels and order[labels[-1]] >= before:
        return labels[-1]
    return f"{name}#{len(labels) + 1}" if labels else name


def _first_owner(program: Program, parameters: set[str]) -> str:
    owners = (_owner(program, node, parameters) for node in program.graph.nodes)
    return next((owner for owner in owners if owner is not None), "model")


def _layer(program: Program, name: str, nodes: list[fx.Node], parameters: set[str]) -> Layer:
    for node in nodes:
        update_info(node, layer=name)
    own = next((n for n in nodes if _owner(program, n, parameters) is not None), nodes[0])
    tensors = dict.fromkeys(name for node in nodes for name in tensors_of_node(program, node))
    return Layer(name, tuple(n.name for n in nodes), tuple(tensors), info(own).source)


def _is_frozen(program: Program, layer: Layer) -> bool:
    parameters = [program.tensors[name] for name in layer.tensors if program.tensors[name].parameter]
    return bool(parameters) and not any(parameter.trainable for parameter in parameters)


def _mark_copied(graph: fx.Graph, own: set[str]) -> None:
    """Set `copied_to_each_stage` of every node.  own: tensors that one role has: parameters, what is made of them."""
    for node in graph.nodes:
        if node.op == "get_attr":
            copied = node.target not in own
        elif node.op in ("placeholder", "output", "call_module"):
            copied = False
        elif isinstance(info(node).spec, SizeSpec) or (node.target is getattr and node.args[1] == "device"):
            copied = True
        else:
            copied = all(info(n).copied_to_each_stage for n in node.all_input_nodes)
        update_info(node, copied_to_each_stage=copied)
    stored = [node for node in graph.nodes if node.target is store_buffer and not info(node).copied_to_each_stage]
    if found := {str(node.args[0].target) for node in stored} - own:
        _mark_copied(graph, own | found)
