"""The names by which a stage's methods and the lines that call them know its values."""

from __future__ import annotations

import keyword

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.graph import cut_of, is_entry
from splitc.ir.names import RESERVED
from splitc.ir.program import LoweredProgram, Program, Stage
from splitc.ir.schedule.actions import RankProgram
from splitc.ir.stage_parts import Part


def receiving(outputs: LoweredProgram) -> list[str]:
    """The role of the readers, if what the model returns travels to it."""
    return [stage.role for stage in outputs.stages if stage.has_loss and any(cut.sent for cut in stage.receives)]


def method_name(program: Program, stage: Stage, alone: bool, part: Part = Part.FORWARD) -> str:
    """The method that runs a stage, alone in its class or one of several: not the name of something that it holds."""
    paths = [name for tensor in program.tensors.values() for name in (tensor.name, *tensor.names)]
    paths += [str(node.target) for node in program.graph.nodes if node.op == "call_module"]  # regions without tensors
    name = "_".join([str(part.value), *[stage.role] * (not alone)]) + stage.mode
    while name in {path.partition(".")[0] for path in paths}:
        name += "_"
    return name


def constant(name: str, rank_program: RankProgram, stage: Stage) -> str:
    """A constant of a stage, `BUCKETS`, or `CONV_BUCKETS` beside those of another stage."""
    return name if len(rank_program.roles) == 1 else f"{stage.role.upper()}_{name}"


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
