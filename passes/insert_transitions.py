"""Bring the values of a role with groups to the states that their readers need: one node for each value and state.

    relu1 = relu(fc6)        features              relu1 = relu(fc6)
    fc7 = fc7(relu1)         needs it whole   ->   relu1_whole = shard(relu1, features=4096)
    fc8 = fc8(relu1)         likewise              fc7 = fc7(relu1_whole); fc8 = fc8(relu1_whole)

Where each rank computes a part of what follows from a whole value, it is divided, and its gradients are terms of a sum;
where other nodes read it too, `copy_to_group` is between.  A transition of what just arrived, which all its readers
need, is an entry: an action before the stage runs.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, info, insert_after, tensor_spec, update_info
from splitc.ir.program import PlacedProgram
from splitc.ir.transitions import all_to_all, modulo, options_of, transition_of
from splitc.passes.rows_apart import flattened, unflattened
from splitc.runtime.collectives.layouts import State, Transition

_WORDS = {State.REPLICATE: "whole", State.FEATURES: "part", State.BATCH: "own"}
"""What ends the name of a value in another state."""


class Transitions:
    """The transitions of one role."""

    def __init__(self, program: PlacedProgram, graph: fx.Graph, role: str) -> None:
        self._program, self._graph, self._role = program, graph, role
        self._moved: dict[tuple[fx.Node, State], fx.Node] = {}
        self._dividing: dict[fx.Node, list[fx.Node]] = {}  # a whole value -> readers that compute a part each

    def moved(self, value: fx.Node, state: State) -> fx.Node:
        """A value in another state."""
        own = info(value).state or State.REPLICATE
        if own is state:
            return value
        if (value, state) not in self._moved:
            name = f"{value.name}_{'group' if value.target is comm_ops.recv else _WORDS[state]}"
            self._moved[value, state] = self.insert(value, own, state, name)
            if own is State.REPLICATE and value in self._moved[value, state].all_input_nodes:
                self.divides(value, self._moved[value, state])
        return self._moved[value, state]

    def divides(self, value: fx.Node, reader: fx.Node) -> None:
        """Note that each rank computes a part of what follows from a whole value in `reader`."""
        self._dividing.setdefault(value, []).append(reader)

    def settle(self, node: fx.Node, state: State) -> None:
        """Let the readers of a node's result have it in the state that its layer asks for."""
        if info(node).state is not state:
            readers = list(node.users)
            node.replace_all_uses_with(self.moved(node, state), delete_user_cb=readers.__contains__)

    def insert(self, value: fx.Node, source: State, target: State, name: str) -> fx.Node:
        """A transition right after a value."""
        if info(value).outer > 1 and State.BATCH in (source, target):
            moved = self.insert(unflattened(self._graph, value), source, target, f"{name}_apart")
            return flattened(self._graph, moved, value, state=target)
        spec = tensor_spec(value)
        if (spec.batch_dim is None or not info(value).outer) and State.BATCH in (source, target):
            lacks = "has no examples of which a rank could have its own"
            raise PlacementError(
                f"{value.name} ({info(value).source}) is {source}, and "
                f"{lacks if spec.batch_dim is None else 'depends on which examples a rank has'}; give all layers that "
                f"the loss reads the same state"
            )
        node, options = options_of(
            Transition(source, target), spec.shape[-1] if spec.shape else 1, spec.batch_dim or 0, spec.rows
        )
        return insert_after(self._graph, value, node, (value,), name, value, options, state=target, shards={}, cut=None)

    def finish(self) -> None:
        """Sum the gradients of what is divided, and make entries."""
        for value, readers in self._dividing.items():
            self._sum_gradients(value, [reader for reader in readers if reader in value.users])
        self._hoist_entries()

    def _sum_gradients(self, value: fx.Node, readers: list[fx.Node]) -> None:
        """Let the gradients of the readers that compute a part each be summed: in the transition before, or apart.

        Slices compute parts too, where columns are among the readers; alone, their gradients are gathered.
        """
        parts = [reader for reader in readers if transition_of(reader) is None]
        if not tensor_spec(value).requires_grad or not parts:
            return
        is_flattened = value.target == "flatten" and info(value).outer > 1
        moved = value.all_input_nodes[0] if is_flattened else value
        before, only = transition_of(moved), moved is value or len(moved.users) == 1
        if set(value.users) == set(readers) and before is not None and before.target is State.REPLICATE and only:
            self._change(moved, Transition(before.source, State.DIVIDED))
            update_info(value, state=State.DIVIDED)
            for reader in readers:
                if (own := transition_of(reader)) is not None:
                    self._change(reader, Transition(State.DIVIDED, own.target))
            return
        entered = self.insert(value, State.REPLICATE, State.DIVIDED, f"{value.name}_enter")
        for reader in parts:
            reader.replace_input_with(value, entered)

    def _change(self, node: fx.Node, transition: Transition) -> None:
        """Make a transition another one of the same node."""
        spec = tensor_spec(node)
        _, options = options_of(transition, spec.shape[-1] if spec.shape else 1, spec.batch_dim or 0, spec.rows)
        node.kwargs = options
        update_info(node, state=transition.target)

    def _hoist_entries(self) -> None:
        """Make entries of transitions of what was received, where nothing else reads it."""
        for node in list(self._graph.nodes):
            if node.target is not comm_ops.recv or info(node).role != self._role:
                continue
            users = [user for user in node.users if not info(user).once]
            entry = users[0] if users else node
            if len(users) != 1 or entry.target not in (modulo, all_to_all):
                if info(node).state and self._program.plan.grouping(self._role).turns > 1:
                    raise PlacementError(
                        f"{node.name} ({info(node).source}) is read in several states, which is not possible in "
                        f"microbatches of a group; use scheme=BK"
                    )
                continue
            arrives, transition = self._arrives(node, entry), transition_of(entry)
            cut = replace(cut_of(node), entry=transition, arrives=arrives)
            if arrives is State.FEATURES or (arrives is State.REPLICATE and not cut.gradient):
                cut = replace(cut, entry=None)
                entry.replace_all_uses_with(node)
                self._graph.erase_node(entry)
                update_info(node, state=arrives)
            else:
                update_info(entry, cut=cut)
            for each in self._graph.nodes:
                own = info(each).cut
                if own is not None and (own.name, own.consumer) == (cut.name, self._role):
                    update_info(each, cut=cut)
                    if arrives is not State.BATCH and each is not entry:
                        each.update_kwarg("to", str(arrives))

    def _arrives(self, node: fx.Node, entry: fx.Node) -> State:
        """How the groups receive a cut that they need in another state: at once so, or by examples."""
        plan, cut, needed = self._program.plan, cut_of(node), info(entry).state
        comes_whole = plan.in_pieces and cut.value in {each.name for each in self._program.inputs}
        if not cut.sent or comes_whole or plan.grouping(self._role).turns > 1:
            return State.BATCH  # what comes before the first microbatch is cut into them by examples
        is_target = any(each.target and each.name == cut.value for each in self._program.inputs)
        possible = State.FEATURES if needed is State.FEATURES else State.REPLICATE
        natural = possible if is_target or possible is State.FEATURES else State.BATCH
        places = (plan.placements.get(info(user).layer) for user in entry.users)
        asked = {State(place.arrives or natural) for place in places if place is not None}
        if wrong := asked - {State.BATCH, possible}:
            raise PlacementError(
                f"{node.name} ({info(node).source}) is to arrive in state {min(wrong)}, but is read in state "
                f"{possible}; take that, or batch"
            )
        return min(asked, default=natural)
