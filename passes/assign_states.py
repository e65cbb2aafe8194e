"""Give every value of a role with groups a state, and insert the transitions between them (LAYOUTS 2 and 3).

This pass rewrites.  It walks the nodes of the role; each needs its inputs in some state and makes its result in one:

    columns      divided -> features         each rank has some output features: W[own, :]
    rows         features -> partial         each rank multiplies its input features, W[:, own]; the terms are summed
    embedding    replicate -> features       each rank has some features of every row
    elementwise  features -> features        relu, dropout, ..., and normalisations over examples
    columns of rows, sums of features        features -> partial (`on_features.py`)
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

import torch.nn.functional as F
from torch import fx

from splitc.checks.graph import graph_is_sound
from splitc.checks.states import gradients_reach_their_states, values_are_in_their_states
from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, put_in_place, rename, set_info, tensor_spec, tensors_of_node, update_info
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
from splitc.passes.insert_transitions import Transitions
from splitc.passes.on_features import OnFeatures, is_size
from splitc.passes.parameter_sums import require_one_division, sum_over_role
from splitc.runtime.collectives.layouts import State


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
        self._features = OnFeatures(program, graph, role, self._transitions)

    def run(self) -> None:
        nodes = [node for node in self._graph.nodes if info(node).role == self._role]
        unread = {node for node in nodes if not node.users}
        for node in nodes:
            if node.op not in ("get_attr", "output"):
                self._visit(node)
        for node in reversed(list(self._graph.nodes) if self._features.parts else []):  # what only wholes of parts read
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
        if linear.node.target is comm_ops.linear_cross_entropy:
            self._features.divide_loss(linear.node, place)
            return
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
        states = {own for n in node.all_input_nodes if (own := info(n).state) and not is_size(n)}
        first = next(iter(node.all_input_nodes), node)
        asked = place.state if place is not None else None
        state = State.BATCH if asked == State.BATCH or info(node).once else State.REPLICATE
        if self._features.take(node, states, state):
            return
        if isinstance(info(first).spec, tuple):
            state = info(first).state or state
        self._read(node, state)
        if not (states or is_size(node)):
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
