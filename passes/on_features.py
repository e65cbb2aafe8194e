"""Let the nodes of a role with groups compute with the features that each rank has, and make these where none has all.

y = relu(x)                    features -> features       a parameter of each feature is divided, or sliced
y = x.gather(1, target)        features -> partial        the rank that has a row's column gives it, others zero
y = x.sum(1)                   features -> partial        a term of the sum
y = where(one_hot(t), a, b)    features -> features       each rank makes its part of one_hot(t)
y = cross_entropy(x, target)   features -> replicate      sums of each row in place of all classes
y = log_softmax(x, -1)         features -> features       likewise; logsumexp to replicate
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.elementwise import (
    Column,
    column_of,
    is_of_log_softmax,
    is_view,
    leaves_last_dim,
    maps_each,
    normaliser_of,
    reads_no_numbers,
    reduction_of,
)
from splitc.ir.graph import info, op_name, put_in_place, rename, set_info, shape_of, tensor_spec, update_info
from splitc.ir.placements import LayerPlacement
from splitc.ir.program import PlacedProgram, SizeSpec, TensorSpec
from splitc.ir.transitions import transition_of
from splitc.passes.insert_transitions import Transitions
from splitc.passes.parameter_sums import readers_of_parameters
from splitc.runtime.collectives.layouts import State

_ZEROS = ("zeros", "new_zeros")


class OnFeatures:
    """Nodes of one role that compute with features.  parts: a value -> this rank's features of it, made apart."""

    def __init__(self, program: PlacedProgram, graph: fx.Graph, role: str, transitions: Transitions) -> None:
        self._program, self._graph, self._role, self._transitions = program, graph, role, transitions
        self._first, self._readers = program.first_names, readers_of_parameters(program, graph, role)
        self.parts: dict[fx.Node, fx.Node] = {}

    def take(self, node: fx.Node, states: set[State], state: State) -> bool:
        """Let a node that reads values in `states` compute with features, where it can; whether it does.

        state: that of its layer.
        """
        first, whole = next(iter(node.all_input_nodes), node), state is State.REPLICATE
        if info(first).state is State.FEATURES and whole and self._divides_classes(node):
            self._cross_entropy(node)
        elif info(first).state is State.FEATURES and whole and normaliser_of(node) and self._is_wide(first, 6):
            self._normalise(node, first)
        elif states == {State.FEATURES} and reads_no_numbers(node) and whole:
            update_info(node, state=state if is_size(node) else None)
        elif states == {State.FEATURES} and leaves_last_dim(node) and info(first).state is not None:
            self._on_features(node)  # what `to` and `view_as` read is like it
        else:
            return State.FEATURES in states and (whole or len(states) == 1) and self._of_features(node)
        return True

    def _of_features(self, node: fx.Node) -> bool:
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
        if info(value).state is State.FEATURES or value in self.parts:
            return self.parts.get(value, value)
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
        self.parts[value] = part
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
        logits, target = node.args[:2]
        of_rows = len(shape_of(logits)) == 2 and not tensor_spec(target).dtype.is_floating_point
        numbers = 8 if node.kwargs.get("label_smoothing") else 6
        return of_rows and self._is_wide(logits, numbers) and node.kwargs.get("reduction") in ("mean", "sum", "none")

    def _is_wide(self, value: Any, numbers: int) -> bool:
        """Whether rows have more features than `numbers`, which are sent in their place, and each rank some."""
        return shape_of(value)[-1] >= max(numbers + 1, self._program.plan.grouping(self._role).size)

    def _cross_entropy(self, node: fx.Node) -> None:
        """cross_entropy(logits, target)  ->  cross_entropy(logits' features, target, features=C)."""
        logits, target, *_ = node.args
        assert isinstance(logits, fx.Node) and isinstance(target, fx.Node)
        usual = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
        options = {key: value for key, value in node.kwargs.items() if value is not None and value != usual.get(key)}
        node.args = (logits, self._transitions.moved(target, State.REPLICATE))
        node.target, node.kwargs = comm_ops.cross_entropy, {"features": shape_of(logits)[-1], **options}
        update_info(node, state=State.REPLICATE)

    def divide_loss(self, node: fx.Node, place: LayerPlacement) -> None:
        """linear_cross_entropy(x, weight, target=t)  ->  the same of this rank's rows of the weight, features=C."""
        if place.state not in (None, State.REPLICATE):
            raise PlacementError(f"{node.name} ({info(node).source}) makes a loss, so it has no state {place.state}")
        target, features = node.kwargs["target"], shape_of(node.args[1])[0]
        assert isinstance(target, fx.Node)
        node.kwargs = {**node.kwargs, "target": self._transitions.moved(target, State.REPLICATE), "features": features}
        update_info(node, state=State.REPLICATE)

    def _normalise(self, node: fx.Node, value: fx.Node) -> None:
        """log_softmax(x)  ->  x - logsumexp(x's features, features=C); a negative log likelihood reads x itself."""
        name, spec = normaliser_of(node), tensor_spec(node)
        for reader in [each for each in node.users if is_of_log_softmax(each)]:
            reader.target, reader.args = F.cross_entropy, (value, *reader.args[1:])
        if not node.users:
            self._graph.erase_node(node)
            return
        if tensor_spec(value).dtype != spec.dtype:
            value = self._made(node, value, "to", (value, spec.dtype))
            update_info(value, spec=replace(tensor_spec(value), dtype=spec.dtype))
        rows = spec if name == "logsumexp" else replace(spec, shape=(*spec.shape[:-1], 1))
        keeps = {"keepdim": True} if len(rows.shape) == len(shape_of(value)) else {}
        made = self._made(node, node, comm_ops.logsumexp, (value,), features=shape_of(value)[-1], **keeps)
        update_info(made, spec=rows, state=State.REPLICATE)
        if name != "logsumexp":
            made = self._made(node, node, operator.sub, (value, made))
            self._on_features(made)
        put_in_place(self._graph, node, self._made(node, node, torch.exp, (made,)) if name == "softmax" else made)


def is_size(node: fx.Node) -> bool:
    """Whether a value is a number made of sizes."""
    return isinstance(info(node).spec, SizeSpec)
