"""The methods that run a stage: what is computed before, in and after its forward, and what each of them reads."""

from __future__ import annotations

from enum import Enum

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, info, is_entry, starts_at_once
from splitc.ir.program import Cut, Stage

EVALUATING, PREDICTING = "_evaluating", "_predicting"
"""`Stage.mode` of methods that run it in evaluation only, or for the model's output only."""


class Part(Enum):
    """A method of a stage, by the first word of its name."""

    WEIGH = "weigh"
    FORWARD = "forward"
    LOSS = "loss"
    OUTPUT = "output"


def parts_of(stage: Stage) -> tuple[Part, ...]:
    """The methods that run a stage, in their order."""
    before = (Part.WEIGH,) if weighed(stage) else ()
    return *before, Part.FORWARD, *((_last(stage),) if stage.after else ())


def is_idle(stage: Stage) -> bool:
    """Whether nothing is computed in a stage, or passed on."""
    return not stage.sends and not any(map(is_computed, stage.graph.nodes))


def part_of(stage: Stage, node: fx.Node) -> Part:
    """The method that computes a node of a stage."""
    if info(node).once or (stage.after and starts_at_once(node)):
        return Part.WEIGH
    return _last(stage) if node.name in stage.after else Part.FORWARD


def _last(stage: Stage) -> Part:
    return Part.LOSS if stage.has_loss else Part.OUTPUT


def is_computed(node: fx.Node) -> bool:
    """Whether a method of a stage computes a node, or waits there: nothing comes or goes with it."""
    op = comm_ops.op_of(node)
    return node.op not in ("placeholder", "get_attr", "output") and (op is None or op.in_stage) and not is_entry(node)


def arriving(stage: Stage, part: Part) -> list[fx.Node]:
    """The inputs and then the received values that a method of a stage reads; a forward that is alone, all received."""
    alone = part is Part.FORWARD and not stage.forward
    inputs = [node for node in stage.graph.nodes if node.op == "placeholder" and _is_read(stage, node, part)]
    received = [node for node in stage.graph.nodes if node.target is comm_ops.recv]
    return [*inputs, *(node for node in received if alone or _is_read(stage, node, part))]


def _is_read(stage: Stage, node: fx.Node, part: Part) -> bool:
    if part is Part.FORWARD and node.op != "placeholder" and node.name in stage.forward:
        return True
    return any(
        _is_read(stage, user, part) if is_entry(user) else is_computed(user) and part_of(stage, user) is part
        for user in node.users
    )


def weighed(stage: Stage, part: Part | None = None) -> list[fx.Node]:
    """What is computed before the forward of a stage, for one of its methods, or all."""
    readers = [part] if part else [each for each in Part if each is not Part.WEIGH]
    nodes = (node for node in stage.graph.nodes if is_computed(node) and part_of(stage, node) is Part.WEIGH)
    return [node for node in nodes if any(part_of(stage, user) in readers for user in node.users)]


def returned_cuts(stage: Stage) -> list[Cut]:
    """The cuts whose values a stage computes or passes on, but for inputs, which are sent as they are."""
    return [cut for cut in stage.sends if cut.value not in stage.inputs]


def values_sent(stage: Stage) -> list[fx.Node]:
    """The values of these cuts."""
    sent = {cut_of(node): node.all_input_nodes[0] for node in stage.graph.nodes if node.target is comm_ops.send}
    return [sent[cut] for cut in returned_cuts(stage)]


def parameters(stage: Stage, part: Part) -> list[fx.Node]:
    """What a method is given: what the forward returned, if it comes after it, inputs, received values, and weights."""
    named = {node.name: node for node in stage.graph.nodes}
    before = [named[name] for name in stage.forward] if part in (Part.LOSS, Part.OUTPUT) else []
    return [*before, *arriving(stage, part), *(weighed(stage, part) if part is not Part.WEIGH else ())]


def returned_by(stage: Stage, part: Part) -> list[fx.Node]:
    """The nodes whose values a method returns."""
    named = {node.name: node for node in stage.graph.nodes}
    losses = stage.graph.output_node().all_input_nodes
    match part:
        case Part.WEIGH:
            return weighed(stage)
        case Part.FORWARD if stage.forward:
            return [named[name] for name in stage.forward]
        case Part.LOSS:
            return losses
    return [*values_sent(stage), *losses]
