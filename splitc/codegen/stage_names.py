"""The names by which a stage's methods and the lines that call them know its values."""

from __future__ import annotations

import keyword

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, denominators, info, is_entry
from splitc.ir.names import RESERVED
from splitc.ir.plan import SERVER
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, Program, Stage
from splitc.ir.schedule.actions import RankProgram

EVALUATING = "_evaluating"
"""Ends the name of a method that runs a stage in evaluation only."""

PREDICTING = "_predicting"
"""Ends the name of a method that runs a stage for the model's output only."""


def own_evaluation(program: PlacedProgram, stage: Stage) -> Stage | None:
    """What the role of a stage runs in evaluation; None where that is the same."""
    if not isinstance(program.evaluation, LoweredProgram) or stage.role == SERVER:
        return None
    evaluated = program.evaluation.stage(stage.role)
    return None if str(evaluated.graph) == str(stage.graph) else evaluated


def own_outputs(program: PlacedProgram, stage: Stage) -> Stage | None:
    """What the role of a stage runs for the model's output; None where it is a stage of training or evaluation."""
    if not isinstance(program.outputs, LoweredProgram):
        return None
    found = next((each for each in program.outputs.stages if each.role == stage.role), None)
    return found if found is not None and predicting_by(program, found) == PREDICTING else None


def predicting_by(program: PlacedProgram, stage: Stage) -> str:
    """What ends the name of the method that runs a stage of outputs: of training, of evaluation, or of its own."""
    for suffix, other in (("", program), (EVALUATING, program.evaluation)):
        known = other.stages if isinstance(other, LoweredProgram) else ()
        if any(each.role == stage.role and _computed(each) == _computed(stage) for each in known):
            return suffix
    return PREDICTING


def _computed(stage: Stage) -> list[str]:
    """What a stage's forward computes and returns, without the inputs that it does not read or only passes on."""
    marks = (comm_ops.all_reduce, comm_ops.push)
    passed = {node for node in stage.graph.nodes if node.target is comm_ops.send and node.args[0].op == "placeholder"}
    nodes = [node for node in stage.graph.nodes if node not in passed and node.target not in marks]
    read = {value for node in nodes for value in node.all_input_nodes}
    kept = [node for node in nodes if node in read or node.op not in ("placeholder", "get_attr")]
    return [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs if n.target is not comm_ops.send else ''}" for n in kept]


def receiving(outputs: LoweredProgram) -> list[str]:
    """The role of the readers, if what the model returns travels to it."""
    return [stage.role for stage in outputs.stages if stage.has_loss and any(cut.sent for cut in stage.receives)]


def method_name(program: Program, stage: Stage, alone: bool, suffix: str = "", verb: str = "forward") -> str:
    """The method that runs a stage, alone in its class or one of several: not the name of something that it holds."""
    held = {name.partition(".")[0] for tensor in program.tensors.values() for name in (tensor.name, *tensor.names)}
    if alone and not suffix and verb == "forward":
        return verb
    name = f"{verb}{suffix}" if alone else f"{verb}_{stage.role}{suffix}"
    while name in held:
        name += "_"
    return name


def constant(name: str, rank_program: RankProgram, stage: Stage) -> str:
    """A constant of a stage, `BUCKETS`, or `CONV_BUCKETS` beside those of another stage."""
    return name if len(rank_program.roles) == 1 else f"{stage.role.upper()}_{name}"


def returned_cuts(stage: Stage) -> list[Cut]:
    """The cuts whose values a stage's forward returns, before the loss; inputs are sent as they are."""
    return [cut for cut in stage.sends if cut.value not in stage.inputs]


def weighed(stage: Stage) -> list[fx.Node]:
    """The whole values, inputs or received, of which a stage computes something once."""
    arriving = (node for node in stage.graph.nodes if node.op == "placeholder" or node.target is comm_ops.recv)
    return [node for node in arriving if any(info(user).once for user in node.users)]


def computed_once(stage: Stage) -> list[str]:
    """The variables of what a stage computes once, for its forward in each microbatch."""
    names = variables(stage.graph)
    return [names[node] for node in denominators(stage.graph)]


def forward_inputs(stage: Stage) -> list[str]:
    """The inputs of the step that `Stage.forward` reads; received values come after them."""
    names = variables(stage.graph)
    return [names[node] for node in stage.graph.nodes if node.op == "placeholder" and _is_read(node)]


def variables(graph: fx.Graph) -> dict[fx.Node, str]:
    """A Python name for every node; received values have the name of their cut."""
    names: dict[fx.Node, str] = {}
    taken = set(RESERVED)
    for node in graph.nodes:
        if is_entry(node) and node.target is not comm_ops.recv:
            names[node] = names[node.args[0]]
            continue
        name = cut_of(node).name if node.target is comm_ops.recv else node.name
        while name in taken or keyword.iskeyword(name):
            name += "_"
        taken.add(name)
        names[node] = name
    return names


def _is_read(node: fx.Node) -> bool:
    return any(user.target is not comm_ops.send and not info(user).once for user in node.users)
