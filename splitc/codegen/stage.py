"""Write the `Stage` module of a role: what it holds (see `module_tree`), and its forward, one layer a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from splitc import units
from splitc.codegen.emit import RESERVED, Emitter
from splitc.codegen.module_tree import ModuleTree
from splitc.ir import comm_ops
from splitc.ir.graph import assigned
from splitc.ir.program import Cut, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.wire import numel_on

_WIDTH = 76
_FRESH = {"clone", "empty", "full", "ones", "zeros", "empty_like", "full_like", "ones_like", "zeros_like"}


def stage_class(program: PlacedProgram, stages: Sequence[Stage], batches: Mapping[str, int | None]) -> list[str]:
    """Lines of the class: its `forward`, or one for each of several stages: `forward_conv`, `forward_fc`.

    batches: role -> examples in the shape comments; None writes `b`, where the role's ranks differ.
    """
    tree = ModuleTree(program, stages)
    lines = [f"class Stage({tree.base}):"]
    lines += ['    """Parameter names are those of the original model, so its checkpoints load."""', ""]
    lines += ["    def __init__(self):", *("        " + line for line in tree.lines())]
    for stage in stages:
        name = "forward" if len(stages) == 1 else method_name(stage)
        lines += ["", *_method(program, stage, tree, name, batches.get(stage.role))]
    return lines


def method_name(stage: Stage) -> str:
    """How a part with several stages calls one."""
    return f"forward_{stage.role}"


def returned_cuts(stage: Stage) -> list[Cut]:
    """The cuts whose values a stage's forward returns, before the loss; inputs are sent as they are."""
    return [cut for cut in stage.sends if cut.value not in stage.inputs]


def _method(program: PlacedProgram, stage: Stage, tree: ModuleTree, name: str, batch: int | None) -> list[str]:
    names = variables(stage.graph)
    emitter = Emitter(names, tree.access)
    inputs = [names[node] for node in stage.graph.nodes if node.op == "placeholder" and _is_read(node)]
    inputs += [names[node] for node in stage.graph.nodes if node.target is comm_ops.recv]
    header = f"    def {name}(self, {', '.join(['comm', *inputs])}):"
    body = _forward(program, stage, emitter, names, batch)
    returned = [emitter.value(_returned(stage, cut)) for cut in returned_cuts(stage)]
    if stage.has_loss:
        output = next(node for node in stage.graph.nodes if node.op == "output")
        returned.append(emitter.value(output.args[0]))
    body.append((f"return {', '.join(returned)}" if returned else "return None", ""))
    return [header, *aligned(body, "        ")]


def aligned(body: list[tuple[str, str]], indent: str) -> list[str]:
    """Statements with their comments in one column where they are not too long for it."""
    column = min(max((len(text) for text, note in body if note), default=0), _WIDTH)
    return [f"{indent}{text:<{column}}  # {note}" if note else f"{indent}{text}" for text, note in body]


def forward_inputs(stage: Stage) -> list[str]:
    """The inputs of the step that `Stage.forward` reads; received values come after them."""
    names = variables(stage.graph)
    return [names[node] for node in stage.graph.nodes if node.op == "placeholder" and _is_read(node)]


def variables(graph: fx.Graph) -> dict[fx.Node, str]:
    """A Python name for every node; received values are called as their cut."""
    names: dict[fx.Node, str] = {}
    taken = set(RESERVED)
    for node in graph.nodes:
        if node.target is comm_ops.modulo:
            names[node] = names[node.args[0]]
            continue
        name = node.meta["cut"].name if node.target is comm_ops.recv else node.name
        while name in taken:
            name += "_"
        taken.add(name)
        names[node] = name
    return names


def _is_read(node: fx.Node) -> bool:
    return any(user.target not in (comm_ops.send, comm_ops.slice_batch) for user in node.users)


def _returned(stage: Stage, cut: Cut) -> fx.Node:
    """The value of a cut as its stage makes it."""
    node = next(
        n
        for n in stage.graph.nodes
        if n.target is comm_ops.send and (n.kwargs["cut"], n.kwargs["role"]) == (cut.name, cut.consumer)
    )
    value = node.args[0]
    if value.target is comm_ops.slice_batch:
        value = value.args[0]
    found: fx.Node = value
    return found


def _forward(
    program: PlacedProgram, stage: Stage, emitter: Emitter, names: dict[fx.Node, str], batch: int | None
) -> list[tuple[str, str]]:
    """(statement, comment) of every layer's line."""
    body: list[tuple[str, str]] = []
    groups = program.plan.groups
    parts = groups[stage.role].size if stage.role in groups else 1
    for node in stage.graph.nodes:
        op = comm_ops.op_of(node)
        if node.op in ("placeholder", "output", "get_attr") or (op is not None and not op.in_stage):
            continue
        if node.target is assigned:
            body += _assignment(node, emitter, names, batch)
            continue
        if node.target is comm_ops.pull:
            body.append(_pull(program, stage, node))
            continue
        text = emitter.expression(node)
        if _folds(node, text):
            emitter.folded[node] = text
            continue
        statement = text if "writes" in node.meta else f"{names[node]} = {text}"
        body.append((statement, _note(node, batch, parts)))
    return body


def _pull(program: Program, stage: Stage, node: fx.Node) -> tuple[str, str]:
    """Waiting for a bucket of parameters."""
    k: Any = node.kwargs["bucket"]
    size = sum(program.tensors[name].nbytes for name in stage.served[k])
    return f"comm.pull({k})", f"{units.nbytes(size)} of parameters"


def _assignment(node: fx.Node, emitter: Emitter, names: dict[fx.Node, str], batch: int | None) -> list[tuple[str, str]]:
    """`y = x.clone()` and `y[key] = value`; without the copy where nothing else reads a tensor made for this."""
    before, key, value = node.args
    lines = []
    if isinstance(before, fx.Node) and list(before.users) == [node] and _is_own(before):
        names[node] = names[before]
    else:
        lines.append((f"{names[node]} = {emitter.receiver(before)}.clone()", ""))
    return [*lines, (f"{names[node]}[{emitter.index(key)}] = {emitter.value(value)}", _note(node, batch))]


def _is_own(node: fx.Node) -> bool:
    """Whether the tensor was made by the line before, so that nothing else shares its memory."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_factory = node.op == "call_function" and getattr(torch, name, None) is node.target and name in _FRESH
    return (
        node.target is assigned
        or is_factory
        or (node.op == "call_method" and (name in _FRESH or name.startswith("new_")))
    )


def _folds(node: fx.Node, text: str) -> bool:
    """Whether a value is written inside its only reader, so that one line holds one layer."""
    if len(node.users) != 1 or len(text) > _WIDTH - 24 or "writes" in node.meta:
        return False
    (user,) = node.users
    changed = user.target is assigned and user.args[0] is node
    if (
        user.op == "output"
        or user.target in (comm_ops.send, comm_ops.slice_batch)
        or changed
        or user.meta.get("layer") != node.meta.get("layer")
    ):
        return False
    uses = sum(arg is node for arg in user.args) + sum(arg is node for arg in user.kwargs.values())
    between = node.next
    while between is not user:
        if "writes" in between.meta:
            return False
        between = between.next
    return uses == 1


def _note(node: fx.Node, batch: int | None, parts: int = 1) -> str:
    spec = node.meta.get("spec")
    source = node.meta["source"]
    if not isinstance(spec, TensorSpec):
        return str(source)
    shape = shape_text(spec, batch)
    if node.meta.get("sharded") and parts > 1:
        shape = f"{shape.removesuffix(')')}/{parts})"  # a part of the features
    return f"{shape:20}  {source}"


def shape_text(spec: TensorSpec, batch: int | None) -> str:
    """`(128, 9216)`, or `(b, 9216)` where the batch differs between ranks."""
    if batch is not None:
        return str(spec.at(batch))
    rows = "b" if spec.rows == 1 else f"{spec.rows}*b"
    sizes = [rows if d == spec.batch_dim else str(n) for d, n in enumerate(spec.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def parameter_count(program: PlacedProgram, stage: Stage) -> int:
    """Parameters that the first rank of the role holds."""
    plan = program.plan
    size = plan.groups[stage.role].size if stage.role in plan.groups else 1
    return sum(numel_on(program, stage, h, 0, size) for h in stage.tensors if program.tensors[h].parameter)


def uses(lines: list[str], word: str) -> bool:
    """Whether generated lines need an import."""
    return any(word in line for line in lines)


def module_imports(lines: list[str]) -> list[str]:
    """The imports that generated lines need, sorted as a formatter would."""
    imports: list[Any] = []
    if uses(lines, "operator."):
        imports += ["import operator", ""]
    if uses(lines, "torch."):
        imports.append("import torch")
    if uses(lines, "F."):
        imports.append("import torch.nn.functional as F")
    imports.append("from torch import nn")
    if uses(lines, "Tree(") or uses(lines, "(Tree)"):
        imports += ["", "from splitc.runtime import Tree"]
    return imports
