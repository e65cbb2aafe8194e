"""Insert the communication that a plan asks for into the graph.

This pass rewrites.  A value read in another role is sent and received, once for each role that reads it:

    pool5 = max_pool2d(conv5)          pool5 = max_pool2d(conv5)
    fc6 = classifier_1(pool5)     ->   sent0 = send(pool5, cut="cut0", role="fc")
                                       cut0 = recv(sent0, cut="cut0", role="conv", shape=(-1, 9216), dtype=float32)
                                       fc6 = classifier_1(cut0)

and the gradients of replicated layers are summed over their role by `all_reduce`.  What can be computed anywhere
(sizes, constants) is copied to the reader's role instead of sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from splitc import comm_ops
from splitc.checks import cuts_are_communicated, graph_is_sound, has_plan
from splitc.errors import InternalError
from splitc.pipeline import Check, Pass
from splitc.program import Cut, Program, SizeSpec, TensorSpec, copy_graph, rename


@dataclass(frozen=True)
class InsertComm(Pass):
    """Insert send, recv and all_reduce nodes."""

    name: ClassVar[str] = "insert-comm"
    requires: ClassVar[tuple[Check, ...]] = (has_plan,)
    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound, cuts_are_communicated)

    def run(self, program: Program) -> Program:
        plan = program.required_plan
        graph, _ = copy_graph(program.graph)
        for node in graph.nodes:
            node.meta["role"] = _role(program, node)
        _copy_everywhere(graph)
        for node in list(graph.nodes):
            for role in dict.fromkeys(user.meta["role"] for user in node.users if user.op != "output"):
                if node.op != "output" and role != node.meta["role"]:
                    _transfer(graph, node, role)
        _rebase_sizes(graph)
        for role, ranks in plan.roles.items():
            summed = tuple(
                h
                for layer in program.layers
                for h in layer.holdings
                if plan.placements[layer.name].role == role
                and program.holdings[h].trainable
                and plan.placements[layer.name].sync == "all_reduce"
            )
            if summed and len(ranks) > 1:
                _all_reduce(graph, role, tuple(dict.fromkeys(summed)))
        return replace(program, graph=graph)


def _role(program: Program, node: fx.Node) -> str:
    plan = program.required_plan
    if node.op == "placeholder":
        return plan.reader
    layer = program.loss.meta["layer"] if node.op == "output" else node.meta["layer"]
    role = plan.placements[layer].role
    assert role is not None
    return role


def _copy_everywhere(graph: fx.Graph) -> None:
    """Give each role its own copy of the `everywhere` nodes that it reads."""
    for node in reversed(list(graph.nodes)):
        if not node.meta.get("everywhere"):
            continue
        for role in dict.fromkeys(user.meta["role"] for user in node.users):
            if role == node.meta["role"]:
                continue
            with graph.inserting_after(node):
                copied = graph.node_copy(node)
            rename(graph, copied, f"{node.name}_{role}")
            copied.meta = {**node.meta, "role": role}
            node.replace_all_uses_with(copied, delete_user_cb=lambda user, role=role: user.meta["role"] == role)
        if not node.users:
            graph.erase_node(node)


def _transfer(graph: fx.Graph, value: fx.Node, role: str) -> None:
    """Send `value` to `role`, and let the readers there read what they receive."""
    spec = value.meta["spec"]
    if _is_size_source(value, role):
        return  # only sizes read it there; `_rebase_sizes` finds them another tensor
    if not isinstance(spec, TensorSpec) or spec.batch_dim is None:
        raise InternalError(
            f"{value.name} ({value.meta['source']}) was cut, but its examples cannot be told apart: {spec}"
        )
    producer = value.meta["role"]
    number = sum(node.target is comm_ops.send and node.meta["cut"].name.startswith("cut") for node in graph.nodes)
    name = value.name if value.op == "placeholder" else f"cut{number}"
    cut = Cut(name, value.name, producer, role, spec, spec.requires_grad)
    with graph.inserting_after(_last_of_role(value)):
        sent = graph.call_function(comm_ops.send, (value,), {"cut": name, "role": role})
    rename(graph, sent, f"sent_{name}")
    sent.meta = {**value.meta, "cut": cut}
    with graph.inserting_after(sent):
        got = graph.call_function(
            comm_ops.recv, (sent,), {"cut": name, "role": producer, "shape": spec.template(), "dtype": spec.dtype}
        )
    rename(graph, got, f"{name}_{role}" if value.op == "placeholder" else name)
    got.meta = {**value.meta, "role": role, "cut": cut}
    value.replace_all_uses_with(got, delete_user_cb=lambda user: user.meta["role"] == role and user is not got)


def _last_of_role(value: fx.Node) -> fx.Node:
    """Where to send: right after the value, but inputs after the last input."""
    while value.op == "placeholder" and value.next.op == "placeholder":
        value = value.next
    return value


def _is_size_source(value: fx.Node, role: str) -> bool:
    readers = [user for user in value.users if user.meta["role"] == role]
    return all(_reads_size(user) for user in readers)


def _reads_size(node: fx.Node) -> bool:
    is_device = node.target is getattr and len(node.args) > 1 and node.args[1] == "device"
    return (isinstance(node.meta["spec"], SizeSpec) and node.target == "size") or is_device


def _rebase_sizes(graph: fx.Graph) -> None:
    """Sizes and devices of values of another role are read off a tensor that the role has."""
    for node in list(graph.nodes):
        if node.op == "output" or not _reads_size(node):
            continue
        source = node.args[0]
        role = node.meta["role"]
        if source.meta["role"] == role:
            continue
        tensor = next(
            n
            for n in graph.nodes
            if n.target is comm_ops.recv and n.meta["role"] == role and n.meta["spec"].batch_dim is not None
        )
        with graph.inserting_after(tensor):
            if node.target is getattr:
                new: Any = graph.call_function(getattr, (tensor, "device"))
                new.meta = dict(node.meta)
            else:
                new = _size(graph, tensor, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _size(graph: fx.Graph, tensor: fx.Node, node: fx.Node) -> Any:
    import operator

    spec, like = tensor.meta["spec"], node.meta
    wanted: SizeSpec = like["spec"]
    value = graph.call_method("size", (tensor, spec.batch_dim))
    value.meta = {**like, "spec": SizeSpec(spec.rows)}
    for function, number in (
        (operator.floordiv, spec.rows),
        (operator.mul, wanted.scale),
        (operator.add, wanted.offset),
    ):
        if number != (0 if function is operator.add else 1):
            with graph.inserting_after(value):
                value = graph.call_function(function, (value, number))
            value.meta = dict(like)
    return value


def _all_reduce(graph: fx.Graph, role: str, parameters: tuple[str, ...]) -> None:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output):
        node = graph.call_function(comm_ops.all_reduce, (), {"role": role, "parameters": parameters})
    node.meta = {"spec": None, "source": "gradients", "role": role, "layer": None}
