"""Divide a role with groups at its transitions, so that those of one microbatch travel while another one is computed.

This pass rewrites, where a step has microbatches.  A stage runs without a pause, and waits for each transition inside;
so a role becomes several of the same ranks, and each transition the entry of the next one:

    fc    fc6 = linear(cut0)                           fc      fc6 = linear(cut0)
          fc6_sum = reduce_scatter(fc6)        ->      fc_2    fc6_sum = reduce_scatter(recv(fc6))
          fc7 = linear(relu(fc6_sum))                          fc7 = linear(relu(fc6_sum))

A node is in the role after all transitions that it depends on.  What depends on none, such as targets, parameters and
entries, is where it is read first.  `Plan.decided` gives the plan with whole roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import ClassVar

from torch import fx

from splitc.checks.graph import cuts_are_communicated, graph_is_sound
from splitc.ir import comm_ops
from splitc.ir.graph import at_the_end, copy_graph, cut_of, info, is_entry, tensors_of_node, update_info
from splitc.ir.pass_manager import Check, Pass
from splitc.ir.plan import Plan
from splitc.ir.program import Cut, PlacedProgram, Program, TensorSpec
from splitc.ir.transitions import transition_of
from splitc.passes.insert_comm import carry, last_of_inputs

Levels = Mapping[fx.Node, int]


@dataclass(frozen=True)
class DivideRoles(Pass[PlacedProgram, PlacedProgram]):
    """Make the transitions of groups entries; a role that passes on what has no examples stays whole."""

    requires: ClassVar[tuple[Check, ...]] = (cuts_are_communicated,)
    ensures: ClassVar[tuple[Check, ...]] = (graph_is_sound, cuts_are_communicated)

    def run(self, program: PlacedProgram) -> PlacedProgram:
        if not program.plan.in_pieces or isinstance(program.evaluation, Program):
            return program
        for role in program.plan.groups:
            program = _divided(program, role)
        return program


def _divided(program: PlacedProgram, role: str) -> PlacedProgram:
    graph, _ = copy_graph(program.graph)
    levels = _levels(graph, role)
    crossing = [value for value in levels if any(levels.get(user, 0) > levels[value] for user in value.users)]
    apart = [value for value in crossing if value.op != "get_attr"]
    if not crossing or not all(_has_examples(value) for value in apart):
        return program
    fresh = (name for name in map((role + "_{}").format, count(2)) if name not in program.plan.roles)
    parts = [role, *islice(fresh, max(levels.values()))]
    for node, level in levels.items():
        update_info(node, role=parts[level])
    _rename_ends(graph)
    names = _fresh_cuts(graph)
    for value in crossing:
        (_enter if _is_boundary(value) else _carry_on)(graph, value, parts, levels, names)
    _divide_sums(program, graph, role, parts, levels)
    return replace(program, graph=graph, plan=_plan(program, role, parts, levels))


# -- levels ------------------------------------------------------------------------------------------------------------


def _levels(graph: fx.Graph, role: str) -> dict[fx.Node, int]:
    """Node of the role -> how many transitions are before it at most."""
    nodes = [node for node in graph.nodes if info(node).role == role and not _is_of_gradients(node)]
    levels, free = dict[fx.Node, int](), set[fx.Node]()
    for node in nodes:
        levels[node] = max((levels[n] + _is_boundary(n) for n in node.all_input_nodes if n in levels), default=0)
        leaf = node.op == "get_attr" or is_entry(node)
        depends = node.op == "placeholder" or _is_boundary(node) or not free.issuperset(node.all_input_nodes)
        if node.target is comm_ops.recv or (not depends and (leaf or not _trains(node))):
            free.add(node)
    for node in reversed(nodes):
        if node in free:
            levels[node] = min((levels[user] for user in node.users if user in levels), default=levels[node])
    return levels


def _is_boundary(node: fx.Node) -> bool:
    """Whether a node is a transition of examples, of which the value or the gradient travels."""
    transition = transition_of(node)
    moves = transition is not None and (transition.move.communicates or transition.adjoint.move.communicates)
    return moves and not is_entry(node) and _has_examples(node)


def _has_examples(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.batch_dim is not None


def _trains(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.requires_grad


def _is_of_gradients(node: fx.Node) -> bool:
    return node.target in (comm_ops.all_reduce, comm_ops.push) or node.op == "output"


# -- values ------------------------------------------------------------------------------------------------------------


def _rename_ends(graph: fx.Graph) -> None:
    """Tell cuts the roles in which they are made and read now."""
    for got in graph.nodes:
        if got.target is comm_ops.recv:
            (sent,) = got.all_input_nodes
            cut = replace(cut_of(got), producer=info(sent).role, consumer=info(got).role)
            sent.update_kwarg("role", cut.consumer)
            got.update_kwarg("role", cut.producer)
            for node in (sent, got, *(user for user in got.users if is_entry(user))):
                update_info(node, cut=cut)


def _fresh_cuts(graph: fx.Graph) -> Iterator[str]:
    taken = {cut.name for node in graph.nodes if (cut := info(node).cut)} | {node.name for node in graph.nodes}
    return (name for name in map("cut{}".format, count()) if name not in taken)


def _enter(graph: fx.Graph, node: fx.Node, parts: list[str], levels: Levels, names: Iterator[str]) -> None:
    """Make a transition the entry of the first role that reads its result."""
    (value,) = node.all_input_nodes
    first = min(levels[user] for user in node.users)
    cut = replace(_local(value, parts[first], next(names)), entry=transition_of(node))
    node.replace_input_with(value, carry(graph, value, cut, last_of_inputs(value)))
    for each in (node, *node.all_input_nodes, *node.all_input_nodes[0].all_input_nodes):
        update_info(each, cut=cut)
    update_info(node, role=parts[first])
    _carry_on(graph, node, parts, {**levels, node: first}, names)


def _carry_on(graph: fx.Graph, value: fx.Node, parts: list[str], levels: Levels, names: Iterator[str]) -> None:
    """Let later roles read a value that they have on the same ranks, and a parameter of their own."""
    for level in sorted({levels[user] for user in value.users if levels.get(user, 0) > levels[value]}):
        if value.op == "get_attr":
            with graph.inserting_after(value):
                new = graph.node_copy(value)
            update_info(new, role=parts[level])
        else:
            new = carry(graph, value, _local(value, parts[level], next(names)), last_of_inputs(value))
        for user in [user for user in value.users if levels.get(user) == level]:
            user.replace_input_with(value, new)


def _local(value: fx.Node, consumer: str, name: str) -> Cut:
    spec, source = info(value).spec, str(value.target) if value.op == "placeholder" else value.name
    assert isinstance(spec, TensorSpec)
    return Cut(name, source, info(value).role, consumer, spec, spec.requires_grad, sent=False)


# -- the program -------------------------------------------------------------------------------------------------------


def _divide_sums(program: PlacedProgram, graph: fx.Graph, role: str, parts: list[str], levels: Levels) -> None:
    """Sum each gradient in the first role that reads its parameter, the last to go backward."""
    first: dict[str, int] = {}
    for node, level in levels.items():
        for name in tensors_of_node(program, node):
            first[name] = min(level, first.get(name, level))
    for node in [n for n in graph.nodes if _is_of_gradients(n) and n.op != "output" and info(n).role == role]:
        for level, part in enumerate(parts):
            options = {
                key: tuple(name for name in names if first.get(name, 0) == level)
                for key, names in node.kwargs.items()
                if key != "role"
            }
            if names := options.pop("parameters"):
                at_the_end(graph, part, node.target, names, **{key: own for key, own in options.items() if own})
        graph.erase_node(node)


def _plan(program: PlacedProgram, role: str, parts: list[str], levels: Levels) -> Plan:
    plan = program.plan
    first: dict[str, int] = {}
    for node, level in levels.items():
        if node.op not in ("placeholder", "get_attr") and not is_entry(node):
            first[info(node).layer] = min(level, first.get(info(node).layer, level))
    roles = {part: ranks for own, ranks in plan.roles.items() for part in (parts if own == role else [own])}
    bounds = {part: plan.batch_offsets[role if part in parts else part] for part in roles}
    groups = {part: plan.grouping(role if part in parts else part) for part in roles if part in (*plan.groups, *parts)}
    placements = {
        layer: replace(place, role=parts[first.get(layer, 0)]) if place.role == role else place
        for layer, place in plan.placements.items()
    }
    part_of = {**plan.part_of, **dict.fromkeys(parts[1:], role)}
    return replace(plan, roles=roles, batch_offsets=bounds, groups=groups, placements=placements, part_of=part_of)
