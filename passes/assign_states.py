"""Give every value of a role with groups a state, and insert the transitions between them (LAYOUTS 2 and 3).

This pass rewrites.  It walks the nodes of the role; each needs its inputs in some state and makes its result in one:

    columns      divided -> features         each rank has some output features: W[own, :]
    rows         features -> partial         each rank multiplies its input features, W[:, own]; the terms are summed
    embedding    replicate -> features       each rank has some features of every row
    elementwise  features -> features        relu, dropout, ..., and normalisations over examples
    columns of rows, sums of features        features -> partial (`elementwise.py`)
    the rest     replicate, or batch         as the state of its layer says

What comes from other roles is in state batch, and so is what goes there.

    relu1 = relu(classifier_1(cut0))                relu1 = relu(classifier_1(cut0))               (b, 4096/2)
    fc7 = classifier_4(relu1)               ->      relu1_whole = shard(relu1, features=4096)      (b, 4096)
    loss = cross_entropy(fc7, target)               fc7 = classifier_4(relu1_whole)                (b, 1000/2)
                                                    fc7_whole = shard(fc7, features=1000, partial=False)
                                                    loss = cross_entropy(fc7_whole, target)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.checks.states import gradients_reach_their_states, values_are_in_their_states
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.elementwise import (
    Column,
    column_of,
    is_view,
    leaves_last_dim,
    maps_each,
    reads_no_numbers,
    reduction_of,
)
from splitc.ir.graph import (
    copy_graph,
    info,
    op_name,
    put_in_place,
    rename,
    set_info,
    shape_of,
    tensor_spec,
    tensors_of_node,
    update_info,
)
from splitc.ir.linears import (
    Linear,
    as_columns,
    as_linear,
    call_as_function,
    embedding_weight,
    is_batch_norm,
    parameter_nodes,
)
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.placements import LayerPlacement
from splitc.ir.program import PlacedProgram, SizeSpec, TensorSpec
from splitc.ir.transitions import transition_of
from splitc.passes.insert_transitions import Transitions
from splitc.passes.parameter_sums import readers_of_parameters, require_one_division, sum_over_role
from splitc.runtime.collectives.layouts import State

_ZEROS = ("zeros", "new_zeros")


@dataclass(frozen=True)
class AssignStates(Pass[PlacedProgram, PlacedProgram]):
    """Insert the transitions of LAYOUTS 2."""

    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound, values_are_in_their_states, gradients_reach_their_states)

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
        self._first = program.first_names
        self._linears = {info(node).layer for node in graph.nodes if as_linear(program, node) is not None}
        self._transitions = Transitions(program, graph, role)
        self._readers = readers_of_parameters(program, graph, role)
        self._parts: dict[fx.Node, fx.Node] = {}  # a value -> this rank's features of it, made apart

    def run(self) -> None:
        nodes = [node for node in self._graph.nodes if info(node).role == self._role]
        unread = {node for node in nodes if not node.users}
        for node in nodes:
            if node.op not in ("get_attr", "output"):
                self._visit(node)
        for node in reversed(list(self._graph.nodes) if self._parts else []):  # what only wholes of parts read
            if info(node).role == self._role and not node.users and node not in unread and node.op.startswith("call"):
                self._graph.erase_node(node)
        require_one_division(self._program, self._graph, self._role)
        sum_over_role(self._program, self._graph, self._role, self._transitions)
        self._transitions.finish()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        spec, place = info(node).spec, self._program.plan.placements.get(info(node).layer)
        if node.op == "placeholder" or node.target is comm_ops.recv:
            if isinstance(spec, TensorSpec) and spec.batch_dim is not None:
                update_info(node, state=State.BATCH)
            return
        if node.target is comm_ops.send:
            self._read(node, State.BATCH)
            return
        sharded = place if place is not None and place.holding == "sharded" else None
        linear = as_columns(self._program, node)
        if linear is not None and sharded is not None:
            self._rows(linear, sharded) if sharded.split == "rows" else self._columns(linear, sharded)
        elif sharded is not None and sharded.split == "rows" and embedding_weight(self._program, node) is not None:
            self._rows_of_table(node, sharded)
        elif sharded is not None and self._is_by_features(node):
            self._by_features(node)
        else:
            self._plain(node, place)

    def _columns(self, linear: Linear, place: LayerPlacement) -> None:
        whole = self._transitions.moved(linear.value, State.REPLICATE)
        linear.node.replace_input_with(linear.value, whole)
        self._transitions.divides(whole, linear.node)
        shards = {} if linear.bias is None else {self._first[linear.bias]: 0}
        for node in (linear.node, *linear.computed):
            update_info(node, shards={self._first[linear.weight]: linear.dim} | (shards if node is linear.node else {}))
        update_info(linear.node, state=State.FEATURES)
        self._transitions.settle(linear.node, State(place.state or State.FEATURES))

    def _rows(self, linear: Linear, place: LayerPlacement) -> None:
        """y = x W^T + b  ->  y = reduce_from_group(linear(x's features, W's part)) + b."""
        node, graph, target = linear.node, self._graph, State(place.state or State.REPLICATE)
        if as_linear(self._program, node) is None:
            raise PlacementError(
                f"{node.name} ({info(node).source}) multiplies by what is computed of {linear.weight}, so it cannot be "
                f"divided by rows; use columns"
            )
        value = self._transitions.moved(linear.value, State.FEATURES)
        weight, bias = parameter_nodes(graph, linear)
        with graph.inserting_before(node):
            product = graph.call_function(F.linear, (value, weight))
        set_info(product, info(node), shards={self._first[linear.weight]: 1}, state=State.PARTIAL)
        rename(graph, product, f"{node.name}_part")
        result = self._transitions.insert(product, State.PARTIAL, target, f"{node.name}_sum")
        if bias is not None:
            with graph.inserting_before(node):
                if self._program.tensors[self._first[str(linear.bias)]].dtype != tensor_spec(node).dtype:
                    bias = graph.call_method("to", (bias, tensor_spec(node).dtype))  # under autocast
                    set_info(bias, info(node), spec=None, state=target)
                result = graph.call_function(operator.add, (result, bias))
            divided = {self._first[str(linear.bias)]: 0} if target is State.FEATURES else {}
            set_info(result, info(node), state=target, shards=divided)
        put_in_place(graph, node, result)

    def _rows_of_table(self, node: fx.Node, place: LayerPlacement) -> None:
        """y = embedding(indices, W)  ->  y = reduce_from_group(embedding(indices, W's rows))."""
        node = (call_as_function(self._program, self._graph, node) or node) if node.op == "call_module" else node
        if node.target is not F.embedding:
            raise PlacementError(f"{node.name} ({info(node).source}) sums bags, so its rows cannot be divided")
        given: dict[str, Any] = dict(zip(("input", "weight", "padding_idx"), node.args, strict=False)) | node.kwargs
        name = self._first[str(given["weight"].target)]
        rows, padding = self._program.tensors[name].shape[0], given.get("padding_idx")
        indices = self._transitions.moved(given["input"], State.REPLICATE)
        options = {"rows": rows} | ({} if padding is None else {"padding_idx": padding % rows})
        with self._graph.inserting_before(node):
            found = self._graph.call_function(comm_ops.embedding, (indices, given["weight"]), options)
        set_info(found, info(node), shards={name: 0}, state=State.PARTIAL)
        rename(self._graph, found, f"{node.name}_part")
        target = State(place.state or State.REPLICATE)
        put_in_place(self._graph, node, self._transitions.insert(found, State.PARTIAL, target, f"{node.name}_sum"))

    def _is_by_features(self, node: fx.Node) -> bool:
        """Whether a node of a sharded layer is an embedding, or normalises features over examples."""
        if embedding_weight(self._program, node) is not None:
            return True
        reads = [n for n in node.all_input_nodes if n.op != "get_attr"]
        divided = info(node).layer not in self._linears or any(info(n).state is State.FEATURES for n in reads)
        return is_batch_norm(self._program, node) and divided

    def _by_features(self, node: fx.Node) -> None:
        """Each rank has the features of its shard."""
        is_embedding = embedding_weight(self._program, node) is not None
        self._read(node, State.REPLICATE if is_embedding else State.FEATURES)
        names = [name for name in tensors_of_node(self._program, node) if self._program.tensors[name].shape]
        update_info(node, shards=dict.fromkeys(names, int(is_embedding)), state=State.FEATURES)

    def _plain(self, node: fx.Node, place: LayerPlacement | None) -> None:
        """A node that runs on features where its inputs lie so and it can, else in the state of its layer."""
        states = {info(n).state for n in node.all_input_nodes if info(n).state and not _is_size(n)}
        first = next(iter(node.all_input_nodes), node)
        asked = place.state if place is not None else None
        state = State.BATCH if asked == State.BATCH or info(node).once else State.REPLICATE
        if info(first).state is State.FEATURES and self._divides_classes(node) and state is State.REPLICATE:
            self._cross_entropy(node)
            return
        if states == {State.FEATURES}:
            if reads_no_numbers(node) and state is State.REPLICATE:
                update_info(node, state=state if _is_size(node) else None)
                return
            if leaves_last_dim(node) and info(first).state is not None:  # what `to` and `view_as` read is like it
                self._on_features(node)
                return
        if State.FEATURES in states and (state is State.REPLICATE or len(states) == 1) and self._of_features(node):
            return
        if isinstance(info(first).spec, tuple):
            state = info(first).state or state
        self._read(node, state)
        if not (states or _is_size(node)):
            return
        if node.target not in comm_ops.DENOMINATORS:  # which are equal on all ranks
            update_info(node, state=state)
        if state is State.BATCH:
            self._on_own_examples(node)

    def _on_own_examples(self, node: fx.Node) -> None:
        """A node that computes with a rank's own examples: so its gradient of what has none is a term of a sum."""
        if node.target in comm_ops.OF_EXAMPLES:
            node.update_kwarg("own", True)
        for value in node.all_input_nodes:
            spec = info(value).spec
            if value.op == "get_attr" or info(value).state is not None or not isinstance(spec, TensorSpec):
                continue
            if value.target is comm_ops.scale_by_share:  # a term of the loss that no example is in
                update_info(value, state=State.BATCH)
                self._on_own_examples(value)
            else:
                self._transitions.divides(value, node)

    def _of_features(self, node: fx.Node) -> bool:
        """Let a node compute with features where it can; whether it does."""
        column, how = column_of(node), reduction_of(node)
        if maps_each(node) and self._fit(node, shape_of(node)):
            self._on_features(node)
        elif column is not None and info(column.value).state is State.FEATURES and column.source is not None:
            put_in_place(self._graph, node, self._put(node, column.value, column, node))
        elif column is not None and info(column.value).state is State.FEATURES:
            index, features = self._transitions.moved(column.at, State.REPLICATE), shape_of(column.value)[-1]
            term = self._made(node, node, comm_ops.pick, (column.value, index), features=features)
            put_in_place(self._graph, node, self._summed(term, node))
        elif how in ("sum", "mean") and self._fit(node, shape_of(first := node.all_input_nodes[0])):
            self._on_features(node, features=(features := shape_of(first)[-1]))
            update_info(node, state=State.PARTIAL)
            readers, term = list(node.users), node
            if how == "mean":
                term = self._made(node.next, node, comm_ops.scale_by_part, (node,), features=features)
            node.replace_all_uses_with(self._summed(term, node), delete_user_cb=readers.__contains__)
        else:
            return False
        return True

    def _summed(self, term: fx.Node, node: fx.Node) -> fx.Node:
        update_info(term, state=State.PARTIAL)
        return self._transitions.insert(term, State.PARTIAL, State.REPLICATE, f"{node.name}_sum")

    def _fit(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        """Whether each rank can have its features of all operands of a node that computes with values of a shape."""
        return all(self._can_divide(each, shape) for each in node.all_input_nodes)

    def _can_divide(self, value: fx.Node, shape: tuple[int, ...]) -> bool:
        """Whether a rank can have its features of an operand of a computation: without a gradient that is gathered.

        So of constants and parameters, of one number for all features of a row, and of what is made of these.
        """
        spec, state, reads = info(value).spec, info(value).state, value.all_input_nodes
        if not isinstance(spec, TensorSpec):
            return True
        if state is None:
            return len(spec.shape) <= len(shape) and (spec.batch_dim is None or op_name(value) in _ZEROS)
        if state is State.FEATURES or spec.batch_dim is None:
            return state is State.FEATURES and spec.shape == shape
        if spec.shape != shape:
            return spec.shape == (*shape[:-1], 1)
        return not spec.requires_grad or (maps_each(value) and all(self._can_divide(each, shape) for each in reads))

    def _on_features(self, node: fx.Node, like: fx.Node | None = None, features: int = 0) -> None:
        """A node that computes with slices of features: so it reads those of constants and parameters too.

        like: what has as many, where the node stands for another one that has the whole.  features: of what it reads.
        """
        features, shards = features or (shape_of(node) or (0,))[-1], dict[str, int]()
        alike = like or next(each for each in node.all_input_nodes if info(each).state is State.FEATURES)
        for value in node.all_input_nodes:
            if info(value).state is State.FEATURES or not isinstance(info(value).spec, TensorSpec):
                continue
            if shape_of(value)[-1:] != (features,):  # a number for all features
                whole = self._transitions.moved(value, State.REPLICATE)
                node.replace_input_with(value, whole)
                self._transitions.divides(whole, node)
            elif (
                not like and value.op == "get_attr" and len(self._readers.get(self._first[str(value.target)], ())) == 1
            ):
                shards[self._first[str(value.target)]] = len(shape_of(value)) - 1
            else:
                node.replace_input_with(value, self._part(value, node, alike))
        if is_view(node) and node.args[-1] == features:
            with self._graph.inserting_before(node):
                width = self._graph.call_method("size", (node.args[0], -1))
            set_info(width, info(node), spec=SizeSpec(0, features))
            node.args = (*node.args[:-1], width)
        if node.target is comm_ops.dropout:
            node.update_kwarg("features", features)
        update_info(node, state=State.FEATURES, shards=shards)

    def _part(self, value: fx.Node, reader: fx.Node, like: fx.Node) -> fx.Node:
        """This rank's features of a value, before `reader`; of what it can make of less, without the whole."""
        if transition_of(value) is not None and info(value).state is State.REPLICATE:
            (value,) = value.all_input_nodes
        column, is_one_hot = column_of(value), value.target is F.one_hot
        if info(value).state is State.FEATURES or value in self._parts:
            return self._parts.get(value, value)
        if is_one_hot or op_name(value) in _ZEROS:
            part = self._made(reader, value, torch.zeros_like, (like,), dtype=tensor_spec(value).dtype)
            if is_one_hot:
                part = self._put(reader, part, Column(value, value.all_input_nodes[0], 1), value)
        elif column is not None and column.source is not None:
            part = self._put(reader, self._part(column.value, reader, like), column, value)
        elif maps_each(value) and value.target is not comm_ops.dropout:
            part = self._made(reader, value, value.target, value.args, **value.kwargs)
            self._on_features(part, like)
        else:
            return self._transitions.moved(value, State.FEATURES)
        self._parts[value] = part
        return part

    def _put(self, reader: fx.Node, part: fx.Node, column: Column, of: fx.Node) -> fx.Node:
        """A part of a value with a column of each row given other numbers."""
        index, source = self._transitions.moved(column.at, State.REPLICATE), column.source
        if isinstance(source, fx.Node):
            source = self._transitions.moved(source, State.REPLICATE)
        put = self._made(reader, of, comm_ops.put, (part, index, source), features=shape_of(of)[-1])
        if isinstance(source, fx.Node):
            self._transitions.divides(source, put)
        return put

    def _made(self, reader: fx.Node, of: fx.Node, target: Any, args: tuple[Any, ...], /, **options: Any) -> fx.Node:
        """A call before `reader` that makes a part of a value."""
        with self._graph.inserting_before(reader):
            new = self._graph.create_node("call_" + ("method" if isinstance(target, str) else "function"), target, args)
        new.kwargs = options
        rename(self._graph, new, f"{of.name}_part")
        layer = info(reader).layer
        set_info(new, info(of), state=State.FEATURES, layer=layer, copied_to_each_stage=False, shards={})
        return new

    def _divides_classes(self, node: fx.Node) -> bool:
        """Whether a cross entropy of divided logits sends less by sums, 2 f x 3 or 4 numbers for a row, than C f."""
        if node.target is not F.cross_entropy:
            return False
        logits, target = map(tensor_spec, node.args[:2])
        numbers = 8 if node.kwargs.get("label_smoothing") else 6
        least = max(numbers + 1, self._program.plan.grouping(self._role).size)
        of_rows = len(logits.shape) == 2 and not target.dtype.is_floating_point
        return of_rows and logits.shape[1] >= least and node.kwargs.get("reduction") in ("mean", "sum", "none")

    def _cross_entropy(self, node: fx.Node) -> None:
        """cross_entropy(logits, target)  ->  cross_entropy(logits' features, target, features=C)."""
        logits, target, *_ = node.args
        assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
        usual = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        options = {key: value for key, value in node.kwargs.items() if value is not None and value != usual.get(key)}
        node.args = (logits, self._transitions.moved(target, State.REPLICATE))
        node.target, node.kwargs = comm_ops.cross_entropy, {"features": shape_of(logits)[-1], **options}
        update_info(node, state=State.REPLICATE)

    # -- values --------------------------------------------------------------------------------------------------------

    def _read(self, node: fx.Node, state: State) -> None:
        """Let a node read all its inputs in one state."""
        for value in node.all_input_nodes:
            spec = info(value).spec
            if isinstance(spec, SizeSpec) and info(value).state not in (None, state):
                raise PlacementError(
                    f"{node.name} ({info(node).source}) computes in state {state} with {value.name}, a size of a value "
                    f"in state {info(value).state}; give the layers of both the same state"
                )
            if isinstance(spec, TensorSpec) and info(value).state is not None:
                node.replace_input_with(value, self._transitions.moved(value, state))


def _is_size(node: fx.Node) -> bool:
    return isinstance(info(node).spec, SizeSpec)
