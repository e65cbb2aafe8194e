"""Group the nodes of a graph into layers.

A layer is a node that owns parameters, with the parameterless nodes that follow it; a parameterless node belongs to
the topologically last layer it depends on, else, made of inputs alone, to that of its first reader.  So a max-pool
after the last convolution is part of it, and a cut above the next layer sends the pooled activations.

Some nodes can be computed anywhere from nothing that crosses a cut: sizes, constants, masks made of them.  They are
marked `meta["everywhere"]` and every role that reads one gets its own copy.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from splitc.ir.graph import holdings_of_node
from splitc.ir.program import Layer, Program, SizeSpec


def group_layers(program: Program) -> dict[str, Any]:
    """The fields `layers` and `frozen_layers` of the program; sets `layer` and `everywhere` in every node's meta."""
    parameters = {alias for h in program.tensors.values() if h.parameter for alias in (h.name, *h.names)}
    members: dict[str, list[fx.Node]] = {}
    index: dict[fx.Node, int] = {}
    waiting: list[fx.Node] = []  # made of inputs alone, and not read yet
    _mark_everywhere(program.graph, parameters)
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        name = _owner(program, node, parameters)
        below = [index[n] for n in node.all_input_nodes if n in index]
        if name is not None:
            name = _label(name, list(members), max(below, default=0))
        elif below:
            name = list(members)[max(below)]
        else:
            waiting.append(node)
            continue
        members.setdefault(name, []).append(node)
        index[node] = list(members).index(name)
        _take(node, name, members, index, waiting)
    if waiting:  # nothing of a layer reads them
        name = next(iter(members), None) or _first_owner(program, parameters)
        members.setdefault(name, []).extend(waiting)
        index.update(dict.fromkeys(waiting, list(members).index(name)))
    for node in program.graph.nodes:  # a parameter or buffer belongs to the first layer that reads it
        if node.op == "get_attr" and node.users:
            first = min(index[user] for user in node.users if user in index)
            members[list(members)[first]].append(node)
    sequence = {node: i for i, node in enumerate(program.graph.nodes)}
    layers = tuple(
        _layer(program, name, sorted(nodes, key=sequence.__getitem__), parameters) for name, nodes in members.items()
    )
    return {"layers": layers, "frozen_layers": tuple(layer.name for layer in layers if _is_frozen(program, layer))}


def _take(
    reader: fx.Node,
    name: str,
    members: dict[str, list[fx.Node]],
    index: dict[fx.Node, int],
    waiting: list[fx.Node],
) -> None:
    """Let what `reader` reads of the waiting nodes, and what those read, belong to its layer."""
    for node in reader.all_input_nodes:
        if node in waiting:
            waiting.remove(node)
            members[name].append(node)
            index[node] = index[reader]
            _take(node, name, members, index, waiting)


def _owner(program: Program, node: fx.Node, parameters: set[str]) -> str | None:
    """The module whose parameters the node uses, if any."""
    if node.op == "call_module":
        module = program.root.get_submodule(str(node.target))
        return str(node.target) if any(True for _ in module.parameters()) else None
    if "writes" in node.meta and any(name.startswith(f"{node.meta['module']}.") for name in parameters):
        return str(node.meta["module"])  # a counter belongs to the module that counts
    for value in node.all_input_nodes:
        if value.op == "get_attr" and value.target in parameters:
            return str(value.target).rpartition(".")[0] or str(value.target)
    return None


def _label(name: str, order: list[str], before: int) -> str:
    """The layer to join: the module's own, or a further one where layers that this node depends on lie after it."""
    labels = [label for label in order if label.split("#")[0] == name]
    if labels and order.index(labels[-1]) >= before:
        return labels[-1]
    return f"{name}#{len(labels) + 1}" if labels else name


def _first_owner(program: Program, parameters: set[str]) -> str:
    owners = (_owner(program, node, parameters) for node in program.graph.nodes)
    return next((owner for owner in owners if owner is not None), "model")


def _layer(program: Program, name: str, nodes: list[fx.Node], parameters: set[str]) -> Layer:
    for node in nodes:
        node.meta["layer"] = name
    own = next((n for n in nodes if _owner(program, n, parameters) is not None), nodes[0])
    return Layer(name, tuple(n.name for n in nodes), _holdings(program, nodes), own.meta["source"])


def _holdings(program: Program, nodes: list[fx.Node]) -> tuple[str, ...]:
    """First names of the parameters and buffers that the nodes use."""
    return tuple(dict.fromkeys(name for node in nodes for name in holdings_of_node(program, node)))


def _is_frozen(program: Program, layer: Layer) -> bool:
    held = [program.tensors[h] for h in layer.tensors if program.tensors[h].parameter]
    return bool(held) and not any(h.trainable for h in held)


def _mark_everywhere(graph: fx.Graph, parameters: set[str]) -> None:
    for node in graph.nodes:
        if node.op == "get_attr":
            everywhere = node.target not in parameters
        elif "writes" in node.meta or node.op in ("placeholder", "output", "call_module"):
            everywhere = False
        elif isinstance(node.meta["spec"], SizeSpec) or _is_device(node):
            everywhere = True
        else:
            everywhere = all(n.meta["everywhere"] for n in node.all_input_nodes)
        node.meta["everywhere"] = everywhere


def _is_device(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is getattr and node.args[1] == "device"
