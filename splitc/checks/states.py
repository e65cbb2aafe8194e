"""Checks of states in roles with groups: every node reads its inputs in a state that it can compute with (LAYOUTS 3).

They follow the graph by the kinds of nodes and the parameters that are divided, not by what the pass that inserted the
transitions noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.elementwise import leaves_last_dim, maps_each, reads_no_numbers, reduction_of
from splitc.ir.graph import info, shape_of
from splitc.ir.linears import as_columns, embedding_weight, is_batch_norm
from splitc.ir.program import PlacedProgram, SizeSpec, TensorSpec
from splitc.ir.transitions import transition_of
from splitc.runtime.collectives.layouts import State

_WHOLE = (State.REPLICATE, State.DIVIDED)


def values_are_in_their_states(program: PlacedProgram) -> list[str]:
    """Every node reads each value in a state that it needs: none reads a part or a term where it needs all."""
    return [problem for role in program.plan.groups for problem in _values(program, role)]


def gradients_reach_their_states(program: PlacedProgram) -> list[str]:
    """The gradient of every value of which ranks compute a part each is summed over the group exactly once."""
    return [problem for role in program.plan.groups for problem in _gradients(program, role)]


def states_of(program: PlacedProgram, role: str) -> dict[fx.Node, State]:
    """The state of every value of a role that depends on examples."""
    found: dict[fx.Node, State] = {}
    for node in _nodes(program, role):
        spec, transition = info(node).spec, transition_of(node)
        reads = {found[value] for value in node.all_input_nodes if value in found}
        if node.op == "placeholder" or node.target is comm_ops.recv:
            if isinstance(spec, TensorSpec) and spec.batch_dim is not None:
                cut = info(node).cut
                found[node] = State.BATCH if cut is None or cut.entry is not None else cut.arrives
        elif transition is not None:
            found |= {node: transition.target} if reads or transition.target is State.FEATURES else {}  # of a parameter
        elif _divides(program, node) == "columns" or _is_by_features(program, node) or node.target is comm_ops.put:
            found[node] = State.FEATURES
        elif (
            _divides(program, node) == "rows"
            or node.target in (comm_ops.embedding, comm_ops.pick)
            or (State.FEATURES in reads and reduction_of(node) in ("sum", "mean"))
            or (State.PARTIAL in reads and node.target is comm_ops.scale_by_part)
        ):
            found[node] = State.PARTIAL
        elif State.FEATURES in reads and _runs_on_features(node):
            found[node] = State.FEATURES
        elif _is_view_of_rows(node) and reads in ({State.DIVIDED}, {State.PARTIAL}):
            (found[node],) = reads
        elif reads and spec is not None and node.target not in comm_ops.DENOMINATORS:
            found[node] = State.BATCH if reads == {State.BATCH} else State.REPLICATE
    return found


def _values(program: PlacedProgram, role: str) -> Iterator[str]:
    states = states_of(program, role)
    for node in _nodes(program, role):
        reads = [(value, states[value]) for value in node.all_input_nodes if value in states]
        for value, state in reads:
            if state not in (needed := _needed(program, node, value, {state for _, state in reads})):
                wanted = " or ".join(each for each in needed if each is not State.DIVIDED)
                yield (
                    f"role {role}: {node.name} ({info(node).source}) needs {value.name} in state {wanted}, but it is "
                    f"{state}"
                )
        if any(user.op == "output" for user in node.users) and states.get(node) not in (*_WHOLE, State.BATCH, None):
            yield f"role {role}: {node.name} ({info(node).source}) is the loss, but it is {states[node]}"


def _needed(program: PlacedProgram, node: fx.Node, value: fx.Node, reads: set[State]) -> tuple[State, ...]:
    """Return the states that a node takes one of its inputs in; it reads all of them in the states `reads`."""
    transition, divides, spec = transition_of(node), _divides(program, node), info(value).spec
    if node.target == "size" or reads_no_numbers(node):
        return tuple(State)
    if transition is not None:
        return _WHOLE if transition.source in _WHOLE else (transition.source,)
    if node.target is comm_ops.send:
        return (State.BATCH,)
    if _is_view_of_rows(node) and reads == {State.PARTIAL}:
        return (State.PARTIAL,)
    if divides:
        return (State.FEATURES,) if divides == "rows" else _WHOLE
    if _is_by_features(program, node):
        return _WHOLE if embedding_weight(program, node) is not None else (State.FEATURES,)
    if node.target in (comm_ops.cross_entropy, comm_ops.logsumexp, comm_ops.pick, comm_ops.put):
        return (State.FEATURES,) if value is node.args[0] else _WHOLE
    if node.target is comm_ops.scale_by_part:
        return (State.PARTIAL,)
    if State.FEATURES in reads and maps_each(node) and shape_of(value)[-1:] == (1,) != shape_of(node)[-1:]:
        return _WHOLE  # a number for all features of a row
    if State.FEATURES in reads and (_runs_on_features(node) or reduction_of(node)):
        return (State.FEATURES, *_WHOLE) if isinstance(spec, SizeSpec) else (State.FEATURES,)
    return (State.BATCH,) if reads == {State.BATCH} else _WHOLE


def _gradients(program: PlacedProgram, role: str) -> Iterator[str]:
    states = states_of(program, role)
    for node in _nodes(program, role):
        spec = info(node).spec
        for value in node.all_input_nodes if states.get(node) is State.FEATURES and _runs_on_features(node) else ():
            name, of_value = str(value.target), info(value).spec
            trains = value.op == "get_attr" and isinstance(of_value, TensorSpec) and of_value.requires_grad
            if trains and program.first_names[name] not in info(node).shards:
                yield f"role {role}: {node.name} ({info(node).source}) runs on features, and {name} is not divided"
        if states.get(node) not in _WHOLE or not isinstance(spec, TensorSpec) or not spec.requires_grad:
            continue
        parts = [user for user in node.users if _computes_a_part(states, user)]
        others = [user for user in node.users if user not in parts and user.target != "size"]
        divided = states[node] is State.DIVIDED
        if parts and not divided:
            yield (
                f"role {role}: {parts[0].name} ({info(parts[0]).source}) computes a part of what follows from "
                f"{node.name}, whose gradient is never summed over the group"
            )
        if divided and others:
            yield (
                f"role {role}: the gradient of {node.name} ({info(node).source}) is summed over the group, but "
                f"its reader {others[0].name} computes all of it on every rank"
            )


def _computes_a_part(states: Mapping[fx.Node, State], node: fx.Node) -> bool:
    transition = transition_of(node)
    parts = (State.FEATURES, State.BATCH, State.DIVIDED)
    is_part = states.get(node) in parts or comm_ops.sums_classes(node)
    return transition.source is State.DIVIDED if transition is not None else is_part


def _runs_on_features(node: fx.Node) -> bool:
    return maps_each(node) or leaves_last_dim(node)


def _is_view_of_rows(node: fx.Node) -> bool:
    """Whether a node gives rows that lie apart a dim of their own, or takes it away: a term or a sum stays one."""
    return node.target in ("flatten", "unflatten") and any(info(n).outer > 1 for n in (node, *node.all_input_nodes))


def _nodes(program: PlacedProgram, role: str) -> Iterator[fx.Node]:
    for node in program.graph.nodes:
        is_value = node.op not in ("get_attr", "output") and node.target not in (comm_ops.all_reduce, comm_ops.push)
        if info(node).role == role and is_value:
            yield node


def _divides(program: PlacedProgram, node: fx.Node) -> str:
    """Return along what a linear layer's weight is divided, "columns" or "rows"; "" for any other node.

    "classes": along its columns, by a loss over them.
    """
    if comm_ops.sums_classes(node):
        return "classes"
    if (linear := as_columns(program, node)) is None:
        return ""
    reader = linear.computed[0] if linear.computed else node
    dim = info(reader).shards.get(program.first_names[linear.weight])
    return "" if dim is None else "columns" if dim == linear.dim else "rows"


def _is_by_features(program: PlacedProgram, node: fx.Node) -> bool:
    """Whether a node has parameters of its own features: an embedding, or a normalisation over examples."""
    kind = embedding_weight(program, node) is not None or is_batch_norm(program, node)
    return kind and bool(info(node).shards)
