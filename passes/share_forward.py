"""Let one forward of a stage serve training, evaluation and outputs: it ends where the model does.

What each of them computes besides is computed of what that forward returns:

    scores = classifier_6(relu7)                     forward       scores = classifier_6(relu7)
    loss = cross_entropy(scores, target)      ->     loss          cross_entropy(scores, target)
    probabilities = softmax(scores)                  output        softmax(scores)

The forward of a stage ends before the first node of training that outputs do not have; what needs no gradient and does
not communicate may stand before, and is computed later then.  So training does what it did, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, info, is_entry, starts_at_once, stores
from splitc.ir.program import LoweredProgram, Program, Refusal, Stage, TensorSpec
from splitc.ir.stage_parts import EVALUATING, PREDICTING, Part, arriving, is_computed, values_sent


def with_shared_forward(program: LoweredProgram) -> LoweredProgram:
    """The program whose stages, those of evaluation and of outputs too, know which methods run them."""
    trained = {stage.role: stage for stage in program.stages}
    evaluated, predicted = _stages(program.evaluation), _stages(program.outputs)
    for role, stage in evaluated.items():
        evaluated[role] = replace(stage, mode="" if _are_alike(trained[role], stage) else EVALUATING)
    for role, outputs in predicted.items():
        if (base := evaluated.get(role, trained.get(role))) is None:
            continue  # the readers, which compute nothing
        if (shared := _shared(base, outputs)) is None:
            predicted[role] = replace(outputs, mode=PREDICTING)
            continue
        base, predicted[role] = shared
        for stages in (trained, evaluated):
            if role in stages and stages[role].mode == base.mode:
                stages[role] = replace(stages[role], forward=base.forward, after=base.after)
    evaluation, found = program.evaluation, program.outputs
    if isinstance(evaluation, LoweredProgram):
        evaluation = replace(evaluation, stages=tuple(evaluated.values()))
    if isinstance(found, LoweredProgram):
        found = replace(found, stages=tuple(predicted.values()))
    return replace(program, stages=tuple(trained.values()), evaluation=evaluation, outputs=found)


def _stages(program: Program | Refusal | None) -> dict[str, Stage]:
    return {stage.role: stage for stage in program.stages} if isinstance(program, LoweredProgram) else {}


def _shared(stage: Stage, outputs: Stage) -> tuple[Stage, Stage] | None:
    """A stage and that of outputs with one forward; None where the latter has to have one of its own."""
    alike = _alike(stage, outputs)
    forward, after = _divided(stage, alike)
    others = {alike[node]: node for node in alike if node in forward or not is_computed(node)}
    more = [node for node in outputs.graph.nodes if is_computed(node) and node not in others]
    later, sent = {node.name for node in after}, values_sent(stage)
    if bool(after) != stage.has_loss or not later.isdisjoint(node.name for node in (*sent, *more)):
        return None
    needed = [*values_sent(outputs), *(value for node in more for value in node.all_input_nodes)]
    read = [*(others.get(node) for node in needed), *(value for node in after for value in node.all_input_nodes)]
    returned = list(dict.fromkeys([*sent, *(node for node in read if node in forward)]))
    own = replace(stage, forward=tuple(node.name for node in returned), after=tuple(node.name for node in after))
    names = tuple(alike[node].name if node in alike else "" for node in returned)
    other = replace(outputs, mode=stage.mode, forward=names, after=tuple(node.name for node in more))
    given, taken = arriving(own, Part.FORWARD), arriving(other, Part.FORWARD)
    again = [*(arriving(own, Part.LOSS) if after else ()), *(arriving(other, Part.OUTPUT) if more else ())]
    if not returned or (more and "" in names):
        return None
    if any(node.target is comm_ops.recv and (node in given or node in taken) for node in again):
        return None  # what was received is there once, in microbatches
    return (own, other) if [alike.get(node) for node in given] == taken else None


def _divided(stage: Stage, alike: Mapping[fx.Node, fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """What the forward of a stage computes, and what is computed after it.

    The forward may compute what outputs do not need, where it has all for that: what is sent, and what tensors of the
    model are in the next step, which outputs do not change.
    """
    forward, after, kept = set[fx.Node](), list[fx.Node](), set(stores(stage.graph))
    for node in reversed(stage.graph.nodes):
        if node.op != "output" and (not stage.has_loss or (node.users and kept.issuperset(node.users))):
            kept.add(node)
    for node in filter(is_computed, stage.graph.nodes):
        if info(node).once or starts_at_once(node):
            continue
        is_plain = node.target is comm_ops.store_buffer or comm_ops.op_of(node) is None
        has_all = all(each in forward or each.op == "get_attr" for each in node.all_input_nodes)
        if (node in alike or (node in kept and is_plain and has_all)) and all(map(_may_wait, after)):
            forward.add(node)
        else:
            after.append(node)
    return forward, after


def _may_wait(node: fx.Node) -> bool:
    """Whether nothing changes where a node is computed later: no gradient, and nothing on the wire."""
    spec = info(node).spec
    is_free = not isinstance(spec, TensorSpec) or not spec.requires_grad
    return is_free and comm_ops.op_of(node) is None and not info(node).side_effect and node.op != "call_module"


# -- the same nodes of two graphs --------------------------------------------------------------------------------------


def _are_alike(stage: Stage, other: Stage) -> bool:
    """Whether two stages compute and return the same."""
    alike = _alike(stage, other)
    computed = [[node for node in each.graph.nodes if is_computed(node)] for each in (stage, other)]
    returned = [[*values_sent(each), *each.graph.output_node().all_input_nodes] for each in (stage, other)]
    return [[alike.get(node) for node in nodes] for nodes in (computed[0], returned[0])] == [computed[1], returned[1]]


def _alike(stage: Stage, other: Stage) -> dict[fx.Node, fx.Node]:
    """Node of a stage -> that of another one with its name and value, whatever the cuts are called."""
    named = {node.name: node for node in other.graph.nodes}
    received = {_origin(node): node for node in other.graph.nodes if node.target is comm_ops.recv}
    entered = {node.args[0]: node for node in other.graph.nodes if is_entry(node)}
    found: dict[fx.Node, fx.Node] = {}
    for node in stage.graph.nodes:
        if node.target is comm_ops.recv:
            same = received.get(_origin(node))
        else:
            same = entered.get(found.get(node.args[0])) if is_entry(node) else named.get(node.name)
        if same is not None and all(each in found for each in node.all_input_nodes) and _is_same(node, same, found):
            found[node] = same
    return found


_NOT_COMPUTED = ("cut", "partial")
"""Arguments on which what a forward computes does not depend: names of cuts, and how gradients are summed."""


def _origin(node: fx.Node) -> tuple[str, str]:
    """Where a received value comes from."""
    return cut_of(node).producer, cut_of(node).value


def _is_same(node: fx.Node, other: fx.Node, found: Mapping[fx.Node, fx.Node]) -> bool:
    def known(one: fx.Node, arguments: bool) -> tuple[object, ...]:
        kwargs = {key: value for key, value in one.kwargs.items() if key not in _NOT_COMPUTED}
        given = (one.args, kwargs) if arguments else fx.node.map_arg((one.args, kwargs), found.__getitem__)
        return one.op, one.target, info(one).draw, info(one).once, given

    return known(node, False) == known(other, True)
