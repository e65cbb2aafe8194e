"""Divide the linear layers that a plan shards over the ranks of their group (SplitBrain 3.2, listing 1).

This pass rewrites.  It walks the nodes of every role that has groups, and tracks for each value whether a rank has it
replicated or sharded along the last dim:

    columns      replicated -> sharded       each rank has some output features: W[own, :]
    embedding    replicated -> sharded       each rank has some features of every row
    elementwise  sharded -> sharded          relu, dropout, ..., and normalisations over examples
    rows         sharded -> replicated       each rank multiplies its input features, an all-reduce sums: W[:, own]
    the rest     replicated -> replicated    `shard` gathers a sharded input

    relu1 = relu(classifier_1(cut0))                relu1 = relu(classifier_1(cut0))               (b, 4096/2)
    fc7 = classifier_4(relu1)               ->      relu1_whole = shard(relu1, features=4096)      (b, 4096)
    loss = cross_entropy(fc7, target)               fc7 = classifier_4(relu1_whole)                (b, 1000/2)
                                                    fc7_whole = shard(fc7, features=1000, partial=False)
                                                    loss = cross_entropy(fc7_whole, target)

Layers divided by columns compute a term of their input's gradient: they read a value that was gathered for them, or one
that passed `copy_to_group`, whose backward sums the terms.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.checks.sharding import partial_gradients_are_summed, shards_are_gathered
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.elementwise import is_elementwise, keeps_features
from splitc.ir.graph import (
    copy_graph,
    cut_of,
    info,
    insert_after,
    put_in_place,
    rename,
    set_info,
    tensor_spec,
    tensors_of_node,
    update_info,
)
from splitc.ir.linears import Linear, as_linear, parameter_nodes
from splitc.ir.neurons import embedding_weight, is_batch_norm
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.program import PlacedProgram, Program, TensorSpec


@dataclass(frozen=True)
class ShardLayers(Pass[PlacedProgram, PlacedProgram]):
    """Insert shard, copy_to_group and reduce_from_group nodes."""

    name: ClassVar[str] = "shard-layers"
    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound, shards_are_gathered, partial_gradients_are_summed)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        groups = program.plan.groups
        if not groups:
            return program
        graph, _ = copy_graph(program.graph)
        for role in groups:
            _Walk(program, graph, role).run()
        return replace(program, graph=graph)


class _Walk:
    """Walks the nodes of one role."""

    def __init__(self, program: PlacedProgram, graph: fx.Graph, role: str) -> None:
        self._program, self._graph, self._role = program, graph, role
        self._linears = {info(node).layer for node in graph.nodes if as_linear(program, node) is not None}
        self._parts: dict[fx.Node, int] = {}  # values of which a rank has a part -> features of the whole
        self._whole: dict[fx.Node, fx.Node] = {}  # such a value -> its `shard`
        self._readers: dict[fx.Node, list[fx.Node]] = {}  # a whole value -> the sharded layers that read it

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if info(node).role != self._role or node.op in ("placeholder", "get_attr"):
                continue
            linear = as_linear(self._program, node)
            place = self._program.plan.placements.get(info(node).layer)
            is_sharded = place is not None and place.holding == "sharded"
            if linear is not None and place is not None and is_sharded:
                self._rows(linear) if place.split == "rows" else self._columns(linear)
            elif is_sharded and self._is_by_features(node):
                self._by_features(node)
            elif any(n in self._parts for n in node.all_input_nodes):
                self._reader(node)
        for value, readers in self._readers.items():
            self._sum_gradients(value, readers)
        for node in self._graph.nodes:
            if node.target is comm_ops.modulo and info(node).role == self._role:
                readers = self._readers.get(node, [])
                self._set_partial(cut_of(node).name, bool(readers) and set(node.users) == set(readers))

    def _columns(self, linear: Linear) -> None:
        whole = self._gathered(linear.value)
        linear.node.replace_input_with(linear.value, whole)
        self._readers.setdefault(whole, []).append(linear.node)
        self._parts[linear.node] = _features(linear.node)
        update_info(linear.node, shards={linear.weight: 0} | ({} if linear.bias is None else {linear.bias: 0}))
        update_info(linear.node, sharded=True)

    def _rows(self, linear: Linear) -> None:
        """y = x W^T + b  ->  y = reduce_from_group(linear(x's part, W's part)) + b."""
        node, graph = linear.node, self._graph
        value = self._part(linear.value)
        if value not in self._parts:
            raise PlacementError(
                f"{node.name} ({info(node).source}) is to be divided by rows, but its ranks have the whole of "
                f"{linear.value.name}; divide the layer before it by columns, or this one too"
            )
        weight, bias = parameter_nodes(graph, linear)
        with graph.inserting_before(node):
            product = graph.call_function(F.linear, (value, weight))
            result = graph.call_function(comm_ops.reduce_from_group, (product,))
            if bias is not None:
                spec = tensor_spec(node)
                if self._program.tensors[_first(self._program, linear.bias)].dtype != spec.dtype:  # under autocast
                    bias = graph.call_method("to", (bias, spec.dtype))
                    set_info(bias, info(node), spec=None)
                summed, result = result, graph.call_function(operator.add, (result, bias))
                set_info(summed, info(node))
        set_info(product, info(node), shards={linear.weight: 1})
        set_info(result, info(node))
        if bias is not None:
            rename(graph, summed, f"{node.name}_sum")
        rename(graph, product, f"{node.name}_part")
        put_in_place(graph, node, result)

    def _is_by_features(self, node: fx.Node) -> bool:
        """Whether a node of a sharded layer is an embedding, or normalises parts over examples."""
        if is_batch_norm(self._program, node) and info(node).layer not in self._linears:
            for value in node.all_input_nodes:
                node.replace_input_with(value, self._part(value))
        reads_parts = any(value in self._parts for value in node.all_input_nodes)
        return embedding_weight(self._program, node) is not None or (reads_parts and is_batch_norm(self._program, node))

    def _by_features(self, node: fx.Node) -> None:
        """Each rank has the features of its shard."""
        dim = 0 if embedding_weight(self._program, node) is None else 1
        names = [name for name in tensors_of_node(self._program, node) if self._program.tensors[name].shape]
        self._parts[node] = _features(node)
        update_info(node, shards=dict.fromkeys(names, dim), sharded=True)

    def _reader(self, node: fx.Node) -> None:
        """A node that reads parts: it makes parts of them where it can, and reads the whole where it cannot."""
        tensors = [n for n in node.all_input_nodes if isinstance(info(n).spec, TensorSpec)]
        fits = is_elementwise(node) and len({_shape(n) for n in (*tensors, node)}) == 1
        if (fits or keeps_features(node)) and all(n in self._parts for n in tensors):
            self._parts[node] = self._parts[tensors[0]]
            update_info(node, sharded=True)
            if node.target is comm_ops.dropout:
                node.update_kwarg("features", self._parts[node])
            return
        for value in tensors:
            if value in self._parts:
                node.replace_input_with(value, self._gathered(value))

    def _part(self, value: fx.Node) -> fx.Node:
        """`value`, or the features of a whole one that are this rank's, where no gradient passes."""
        if value in self._parts or tensor_spec(value).requires_grad:
            return value
        options, name = {"features": _features(value)}, f"{value.name}_part"
        part = insert_after(self._graph, value, comm_ops.slice_features, (value,), name, value, options, sharded=True)
        self._parts[part] = _features(value)
        return part

    def _gathered(self, value: fx.Node) -> fx.Node:
        """`value`, or what gathers its parts."""
        if value not in self._parts:
            return value
        if value not in self._whole:
            options, name = {"features": self._parts[value], "partial": False}, f"{value.name}_whole"
            self._whole[value] = insert_after(
                self._graph, value, comm_ops.shard, (value,), name, value, options, shards={}, sharded=False
            )
        return self._whole[value]

    def _sum_gradients(self, value: fx.Node, readers: list[fx.Node]) -> None:
        """Let the gradients of a value's sharded readers be summed: where it was gathered, or by an `enter`."""
        if not tensor_spec(value).requires_grad:
            return
        only = set(value.users) == set(readers)
        if only and value.target is comm_ops.shard:
            value.update_kwarg("partial", True)
        elif not (only and value.target is comm_ops.modulo):
            name = f"{value.name}_enter"
            entered = insert_after(self._graph, value, comm_ops.copy_to_group, (value,), name, value, cut=None)
            for reader in readers:
                reader.replace_input_with(value, entered)

    def _set_partial(self, cut: str, partial: bool) -> None:
        """Say on all nodes of a value's way whether the gradients of its readers are parts of a sum."""
        for node in self._graph.nodes:
            if info(node).cut is not None and (cut_of(node).name, cut_of(node).consumer) == (cut, self._role):
                update_info(node, cut=cut_of(node).with_partial(partial))


def _first(program: Program, name: str | None) -> str:
    """The first name of a tensor that may have several."""
    return next(h.name for h in program.tensors.values() if name in (h.name, *h.names))


def _features(node: fx.Node) -> int:
    return int(tensor_spec(node).shape[-1])


def _shape(node: fx.Node) -> tuple[int, ...]:
    spec = info(node).spec
    return spec.shape if isinstance(spec, TensorSpec) else ()
