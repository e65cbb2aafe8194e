"""Insert the communication that a plan asks for into the graph.

This pass rewrites.  A value read in another role is sent and received, once for each role that reads it:

    pool5 = max_pool2d(conv5)          pool5 = max_pool2d(conv5)
    fc6 = classifier_1(pool5)     ->   sent0 = send(pool5, cut="cut0", role="fc")
                                       cut0 = recv(sent0, cut="cut0", role="conv", shape=(-1, 9216), dtype=float32)
                                       fc6 = classifier_1(cut0)

Between two roles of the same ranks and examples nothing travels.

An `all_reduce` node names the parameters of a role whose gradients are all-reduced, a `push` node those whose gradients
go to servers.  What every role can compute (sizes, constants) is copied to the reader's role instead of sent.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

from torch import fx

from splitc.checks.graph import cuts_are_communicated, graph_is_sound
from splitc.errors import InternalError
from splitc.ir import comm_ops
from splitc.ir.graph import at_the_end, copy_graph, info, insert_after, rename, set_info, tensor_spec, update_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.program import Cut, PlacedProgram, SizeSpec, TensorSpec
from splitc.ir.schedule.verbs import SUMS
from splitc.passes.rows_apart import flattened, unflattened


@dataclass(frozen=True)
class InsertComm(Pass[PlacedProgram, PlacedProgram]):
    """Insert send, recv and all_reduce nodes."""

    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound, cuts_are_communicated)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        plan = program.plan
        graph, _ = copy_graph(program.graph)
        for node in graph.nodes:
            update_info(node, role=_role(program, node))
        _store_in_each_stage(graph)
        _copy_to_each_stage(graph)
        inputs = {each.name for each in program.inputs}
        names = (name for name in map("cut{}".format, count()) if name not in inputs)
        for node in list(graph.nodes):
            for role in dict.fromkeys(info(user).role for user in node.users if user.op != "output"):
                if node.op != "output" and role != info(node).role:
                    _transfer(plan, graph, node, role, names)
        _rebase_sizes(graph)
        for role in plan.roles:
            for sync, verb in SUMS.items():
                if summed := _synchronised(program, role, sync):
                    at_the_end(graph, role, comm_ops.FUNCTIONS[verb], summed)
        return replace(program, graph=graph)


def _synchronised(program: PlacedProgram, role: str, sync: str) -> tuple[str, ...]:
    """The trainable parameters of a role whose gradients are summed in this way."""
    places = program.plan.placements
    layers = [each for each in program.layers if (places[each.name].role, places[each.name].sync) == (role, sync)]
    held = dict.fromkeys(name for layer in layers for name in layer.tensors if program.tensors[name].trainable)
    return tuple(name for name in held if name not in program.tied)


def _role(program: PlacedProgram, node: fx.Node) -> str:
    plan = program.plan
    if node.op == "placeholder":
        return plan.reader
    layer = info(program.loss if node.op == "output" or info(node).once else node).layer
    return plan.placements[layer].role


def _store_in_each_stage(graph: fx.Graph) -> None:
    """Let each role that reads a buffer store what forward makes of it, and read what that is made of."""
    stores: dict[fx.Node, set[str]] = {
        node: set() for node in graph.nodes if node.target is comm_ops.store_buffer and info(node).copied_to_each_stage
    }
    before = None
    while before != stores:
        before, roles = stores, dict[fx.Node, set[str]]()
        for node in reversed(graph.nodes):
            readers: set[str] = set().union(*(roles[user] for user in node.users))
            roles[node] = stores.get(node, readers) if info(node).copied_to_each_stage else {info(node).role}
        stores = {node: roles[node.all_input_nodes[0]] for node in stores}
    for node, found in stores.items():
        own, *others = sorted(found) or [info(node).role]
        update_info(node, role=own)
        for role in others:
            _copied(graph, node, role)


def _copy_to_each_stage(graph: fx.Graph) -> None:
    """Give each role its own copy of the `copied_to_each_stage` nodes that it reads."""
    for node in reversed(list(graph.nodes)):
        if not info(node).copied_to_each_stage or node.target is comm_ops.store_buffer:
            continue
        for role in dict.fromkeys(info(user).role for user in node.users):
            if role == info(node).role:
                continue
            copied = _copied(graph, node, role)
            node.replace_all_uses_with(copied, delete_user_cb=lambda user, role=role: info(user).role == role)
        if not node.users:
            graph.erase_node(node)


def _copied(graph: fx.Graph, node: fx.Node, role: str) -> fx.Node:
    """A copy of a node for another role, after it."""
    with graph.inserting_after(node):
        copied = graph.node_copy(node)
    rename(graph, copied, f"{node.name}_{role}")
    set_info(copied, info(node), role=role)
    return copied


def _transfer(plan: Plan, graph: fx.Graph, value: fx.Node, role: str, names: Iterator[str]) -> None:
    """Send `value` to `role`, and let the readers there read what they receive."""
    spec = info(value).spec
    if all(_reads_size(user) for user in value.users if info(user).role == role):
        return  # only sizes read it there; `_rebase_sizes` finds them another tensor
    producer = info(value).role
    if not isinstance(spec, TensorSpec) or spec.batch_dim is None:
        raise InternalError(
            f"{value.name} ({info(value).source}) was cut, but its examples cannot be told apart: {spec}"
        )
    name = value.name if value.op == "placeholder" else next(names)
    source = str(value.target) if value.op == "placeholder" else value.name
    gradient = spec.requires_grad and any(_may_return(user) for user in value.users if info(user).role == role)
    sent = unflattened(graph, value) if info(value).outer > 1 else value
    cut = Cut(name, source, producer, role, tensor_spec(sent), gradient, sent=not plan.is_local(producer, role))
    got = carry(graph, sent, cut, last_of_inputs(sent))
    if sent is not value:
        reader = next(user for user in value.users if info(user).role == role)
        got = flattened(graph, got, value, role=role, layer=info(reader).layer)
    value.replace_all_uses_with(got, delete_user_cb=lambda user: info(user).role == role and user is not got)


def carry(graph: fx.Graph, value: fx.Node, cut: Cut, after: fx.Node) -> fx.Node:
    """Insert the send and the recv of a cut; return the latter."""
    name, spec = cut.name, cut.spec
    to_role = {"cut": name, "role": cut.consumer}
    sent = insert_after(graph, after, comm_ops.send, (value,), f"sent_{name}", value, to_role, cut=cut)
    options = {"cut": name, "role": cut.producer, "shape": spec.template(), "dtype": spec.dtype}
    own_name = f"{name}_{cut.consumer}" if value.op == "placeholder" else name
    there: dict[str, Any] = {"cut": cut, "role": cut.consumer}
    return insert_after(graph, sent, comm_ops.recv, (sent,), own_name, value, options, **there)


def _may_return(reader: fx.Node) -> bool:
    """Whether a reader may send a gradient back: not one that reads the shape or dtype alone, or whole numbers."""
    spec = info(reader).spec
    return spec.requires_grad if isinstance(spec, TensorSpec) else not isinstance(spec, SizeSpec)


def last_of_inputs(value: fx.Node) -> fx.Node:
    """Where to send: right after the value, but inputs after the last input."""
    while value.op == "placeholder" and value.next.op == "placeholder":
        value = value.next
    return value


def _reads_size(node: fx.Node) -> bool:
    is_device = node.target is getattr and len(node.args) > 1 and node.args[1] == "device"
    return (isinstance(info(node).spec, SizeSpec) and node.target == "size") or is_device


def _rebase_sizes(graph: fx.Graph) -> None:
    """Sizes and devices of values of another role are read off a tensor that the role has."""
    for node in list(graph.nodes):
        if node.op == "output" or not _reads_size(node):
            continue
        source = node.args[0]
        role = info(node).role
        if info(source).role == role:
            continue
        arriving = (n for n in graph.nodes if n.op == "placeholder" or n.target is comm_ops.recv)
        tensor = next(n for n in arriving if info(n).role == role and tensor_spec(n).batch_dim is not None)
        with graph.inserting_after(last_of_inputs(tensor)):
            if node.target is getattr:
                new: Any = graph.call_function(getattr, (tensor, "device"))
                set_info(new, info(node))
            else:
                new = _size(graph, tensor, node)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        _move_readers(graph, new)


def _move_readers(graph: fx.Graph, value: fx.Node) -> None:
    """Move every node that depends on `value` and stands before it behind it, in their order."""
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node is value:
            break
        if value in node.all_input_nodes or not before.isdisjoint(node.all_input_nodes):
            before.add(node)
    last = value
    for node in [n for n in graph.nodes if n in before]:
        last.append(node)
        last = node


def _size(graph: fx.Graph, tensor: fx.Node, node: fx.Node) -> Any:
    spec, like = tensor_spec(tensor), info(node)
    wanted = like.spec
    assert isinstance(wanted, SizeSpec)
    value = graph.call_method("size", (tensor, spec.batch_dim))
    set_info(value, like, spec=SizeSpec(spec.rows))
    steps = ((operator.floordiv, spec.rows, 1), (operator.mul, wanted.scale, 1), (operator.add, wanted.offset, 0))
    for function, number, neutral in steps:
        if number != neutral:
            with graph.inserting_after(value):
                value = graph.call_function(function, (value, number))
            set_info(value, like)
    return value
