"""The names by which a stage's methods and the lines that call them know its values."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

from torch import fx

from splitc import units
from splitc.ir import comm_ops
from splitc.ir.constructors import literal
from splitc.ir.graph import cut_of, is_entry
from splitc.ir.names import RESERVED
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage
from splitc.ir.schedule.actions import RankProgram
from splitc.ir.stage_parts import Part
from splitc.ir.wire import bucket_nbytes


def receiving(outputs: LoweredProgram) -> list[str]:
    """The role of the readers, if what the model returns travels to it."""
    return [stage.role for stage in outputs.stages if stage.has_loss and any(cut.sent for cut in stage.receives)]


def method_name(program: Program, stage: Stage, alone: bool, part: Part = Part.FORWARD) -> str:
    """The method that runs a stage, alone in its class or one of several: not the name of something that it holds."""
    paths = [name for tensor in program.tensors.values() for name in tensor.all_names]
    paths += [str(node.target) for node in program.graph.nodes if node.op == "call_module"]  # regions without tensors
    name = "_".join([str(part.value), *[stage.role] * (not alone)]) + stage.mode
    while name in {path.partition(".")[0] for path in paths}:
        name += "_"
    return name


def constant(name: str, rank_program: RankProgram, stage: Stage) -> str:
    """A constant of a stage, `BUCKETS`, or `CONV_BUCKETS` beside those of another stage."""
    return name if len(rank_program.roles) == 1 else f"{stage.role.upper()}_{name}"


def buckets_text(program: PlacedProgram, stage: Stage, buckets: Sequence[Sequence[str]]) -> str:
    """`12.3 MB in 2 buckets`."""
    total = units.nbytes(sum(bucket_nbytes(program, stage, bucket) for bucket in buckets))
    return f"{total} in {len(buckets)} bucket{'s' if len(buckets) > 1 else ''}"


def bucket_table(program: PlacedProgram, stage: Stage, buckets: Sequence[Sequence[str]], first_line: str) -> list[str]:
    """The lines of a table of buckets."""
    lines = [first_line]
    for bucket in buckets:
        first = f"    (  # {units.nbytes(bucket_nbytes(program, stage, bucket))}"
        lines += [first, *(f"        {literal(name)}," for name in bucket), "    ),"]
    return [*lines, ")"]


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
