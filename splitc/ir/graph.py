"""Copy torch.fx graphs, and find which tensors nodes read and update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.ir import comm_ops
from splitc.ir.program import Cut, Program, Spec, TensorSpec
from splitc.ir.regions import OwnCode, Region, names_in
from splitc.ir.transitions import TRANSITIONS
from splitc.runtime.collectives.layouts import State

T = TypeVar("T")


@dataclass(frozen=True)
class NodeInfo:
    """What the compiler knows about a node.

    spec: its value at any batch size.  source: the user's line, as "alexnet.py:12".  module: path of the module whose
    forward made it.  layer: name of its layer.  role: where it runs.  cut: the cut that it moves.
    is_linear: whether a number is a linear function of the batch size; None for what is no number.
    copied_to_each_stage: every role that reads it computes it.
    once: it is computed of the whole batch, before the first microbatch.
    side_effect: it changes a buffer or waits, and has no value.
    state: how the ranks of a group hold it; None outside of groups.  shards: parameter -> the dim that a group divides.
    is_module: a `get_attr` of a module.  of_module: a `get_attr` of a parameter of a module that is no longer called.
    draw: the ordinal of a region among the random calls.
    outer: the rows of an example lie apart, (outer, examples, rows / outer) flattened; 1: they lie together; 0: an
    example's value depends on which others a rank has, as positions in the batch do.
    """

    spec: Spec = None
    source: str = ""
    module: str = ""
    layer: str = ""
    role: str = ""
    cut: Cut | None = None
    is_linear: bool | None = None
    copied_to_each_stage: bool = False
    once: bool = False
    side_effect: bool = False
    state: State | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    is_module: bool = False
    of_module: bool = False
    draw: int | None = None
    outer: int = 1


def info(node: fx.Node) -> NodeInfo:
    """Return the record of a node."""
    found: NodeInfo = node.meta.get("info", _NOTHING)
    return found


_NOTHING = NodeInfo()


def denominators(graph: fx.Graph) -> list[fx.Node]:
    """Return what is computed once, of the whole batch, and read in every microbatch."""
    return [node for node in graph.nodes if info(node).once and any(not info(user).once for user in node.users)]


def stores(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that give tensors of the model other values from the next step on."""
    return [node for node in graph.nodes if node.target is comm_ops.store_buffer]


def is_region(node: fx.Node) -> bool:
    """Return whether a node calls a region."""
    return node.op == "call_module" and info(node).draw is not None


def has_own_code(graph: fx.Graph) -> bool:
    """Return whether a graph calls a region, whose branches on data say which parameters the loss reaches."""
    return any(map(is_region, graph.nodes))


def called_module(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a node calls; None for a node that calls none."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def arguments_of(node: fx.Node, *names: str) -> dict[str, Any]:
    """The arguments that a node gives by position to parameters of these names, and all that it gives by name."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def region_of(program: Program, node: fx.Node) -> OwnCode | None:
    """What is known of the region that a node calls, by the shapes of its inputs; None for any other node."""
    module = called_module(program.root, node)
    if not isinstance(module, Region):
        return None
    specs: list[Spec] = []
    fx.map_arg((node.args, node.kwargs), lambda each: specs.append(info(each).spec))
    return module.own.called(tuple(spec.template() for spec in specs if isinstance(spec, TensorSpec)))


def set_info(node: fx.Node, new: NodeInfo, **changes: Any) -> None:
    """Give a node the record `new`, with some fields changed."""
    node.meta["info"] = replace(new, **changes)


def update_info(node: fx.Node, **changes: Any) -> None:
    """Change fields of a node's record."""
    set_info(node, info(node), **changes)


def tensor_spec(value: object) -> TensorSpec:
    """Return the spec of a node that is a tensor."""
    assert isinstance(value, fx.Node), value
    spec = info(value).spec
    assert isinstance(spec, TensorSpec), f"{value.name} is no tensor: {spec}"
    return spec


def shape_of(node: object) -> tuple[int, ...]:
    """Return the shape of a value for one example; empty for what is no tensor."""
    spec = info(node).spec if isinstance(node, fx.Node) else None
    return spec.shape if isinstance(spec, TensorSpec) else ()


def has_examples(node: fx.Node) -> bool:
    """Return whether a value is a tensor with a batch dimension."""
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.batch_dim is not None


def cut_of(node: fx.Node) -> Cut:
    """Return the cut that a node moves."""
    cut = info(node).cut
    assert cut is not None, f"{node.name} moves no cut"
    return cut


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy a graph, with the names and meta of its nodes; also return the map from old to new nodes."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy_node(new, node, mapping)
    return new, mapping


def copy_node(graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy `node` into `graph`, with its name and meta; its inputs are those that `mapping` gives.

    Where that has no send for a recv, as in the graph of a stage, None stands for it.
    """
    of = mapping.get if node.target is comm_ops.recv else mapping.__getitem__
    copied = graph.create_node(node.op, node.target, name=node.name)
    copied.args, copied.kwargs = fx.node.map_arg(node.args, of), fx.node.map_arg(node.kwargs, of)
    assert copied.name == node.name, f"{node.name} is taken"
    copied.meta = dict(node.meta)
    return copied


def is_entry(node: fx.Node) -> bool:
    """Return whether a node brings a value into a stage: it receives it, or gathers what was received."""
    return node.target is comm_ops.recv or (node.target in TRANSITIONS and info(node).cut is not None)


def starts_at_once(node: fx.Node) -> bool:
    """Return whether a denominator depends on inputs alone: its sum starts before all else and travels meanwhile."""
    inputs = all(each.op in ("placeholder", "get_attr") or is_entry(each) for each in node.all_input_nodes)
    return node.target is comm_ops.global_weight and inputs and not info(node).once


def insert_after(
    graph: fx.Graph,
    after: fx.Node,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    like: fx.Node,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> fx.Node:
    """A call of `function` right after a node; its record is that of `like`, with some fields changed."""
    with graph.inserting_after(after):
        new = graph.call_function(function, args, dict(options or {}))
    rename(graph, new, name)
    set_info(new, info(like), **changes)
    return new


def at_the_end(
    graph: fx.Graph, role: str, function: Callable[..., Any], parameters: tuple[str, ...], **options: Any
) -> None:
    """Add a node that says how the gradients of a role's parameters are summed."""
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(function, (), {"role": role, "parameters": parameters, **options})
    set_info(node, NodeInfo(source="gradients", role=role))


def reached(first: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield what can be reached from some things, these included, each once."""
    seen, todo = set[T](), [*first]
    while todo:
        if (each := todo.pop()) not in seen:
            seen.add(each)
            yield each
            todo += step(each)


def put_in_place(graph: fx.Graph, node: fx.Node, new: fx.Node) -> None:
    """Let a new node take the name and the readers of `node`, which is removed."""
    name = node.name
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    new.name = name


def rename(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Rename `node`; a suffix is added to a name that is taken."""
    node.name = graph._graph_namespace.create_name(name, None)


def op_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls; empty for a module, whose path may be any word."""
    if node.op == "call_module":
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def tensors_of_node(program: Program, node: fx.Node) -> tuple[str, ...]:
    """First names of the parameters and buffers that a node reads."""
    names: list[str] = []
    for each in (node, *node.all_input_nodes):
        if info(each).is_module or (each is node and node.op == "call_module"):
            names += names_in(program.root, str(each.target))
        elif each.op == "get_attr":
            names.append(str(each.target))
    return tuple(program.first_names[name] for name in names)


NORMS = (F.batch_norm, F.instance_norm)
"""Functions that may update running statistics."""


def changes_statistics(node: fx.Node) -> bool:
    """Whether the node is a normalisation function that updates running statistics."""
    if node.target not in NORMS:
        return False
    named = arguments_of(node, "input", "running_mean", "running_var")
    flag = named.get("training", False) if node.target is F.batch_norm else named.get("use_input_stats", True)
    return flag is True and named.get("running_mean") is not None


def normalises_examples(root: nn.Module, node: fx.Node) -> bool:
    """Whether the node normalises by the mean and the variance of the examples that it is given."""
    if (module := called_module(root, node)) is not None:
        return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    named = arguments_of(node, "input", "running_mean", "running_var", "weight", "bias", "training")
    return node.target is F.batch_norm and named.get("training", False) is True


def assigned(tensor: torch.Tensor, key: Any, value: Any) -> torch.Tensor:
    """A copy of `tensor` with `tensor[key] = value`."""
    new = tensor.clone()
    new[key] = value
    return new
