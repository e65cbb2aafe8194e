"""Write the `Stage` module of a role: what it holds (see `module_tree`), and its forward, one layer a line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from splitc import units
from splitc.codegen.emit import Emitter
from splitc.codegen.layout import Line, aligned, wrapped
from splitc.codegen.module_tree import ModuleTree
from splitc.codegen.stage_names import method_name, variables
from splitc.ir import comm_ops
from splitc.ir.graph import assigned, info, op_name, starts_at_once
from splitc.ir.program import LoweredProgram, PlacedProgram, Refusal, Stage, TensorSpec
from splitc.ir.schedule.actions import Action
from splitc.ir.stage_parts import PREDICTING, Part, is_computed, is_idle, parameters, part_of, parts_of, returned_by
from splitc.ir.torch_ops import ops_with
from splitc.ir.transitions import transition_of
from splitc.ir.wire import inside
from splitc.ir.wire_op import WireOp
from splitc.runtime.collectives.layouts import State

_STATEMENT = 72
"""Columns of a statement, above which the values written inside it get lines of their own."""

_FOLDED = 52
"""Columns of a value that may be written inside its reader."""

_FRESH = ops_with("fresh")
"""Functions and methods whose result shares no memory with other tensors."""


def stage_class(program: LoweredProgram, stages: Sequence[Stage], batches: Mapping[str, int | None]) -> list[str]:
    """Lines of the class: its `forward`, or one for each of several stages: `forward_conv`, `forward_fc`.

    batches: role -> examples in the shape comments; None writes `b`, where the role's ranks differ.
    """
    roles = {stage.role for stage in stages}
    methods: list[tuple[LoweredProgram, Stage, tuple[Part, ...]]] = [(program, s, parts_of(s)) for s in stages]
    if not isinstance(other := program.evaluated, Refusal):
        methods += [(other, each, parts_of(each)) for each in other.stages if each.role in roles and each.mode]
    if not isinstance(other := program.predicted, Refusal):
        own = [each for each in other.stages if each.role in roles and not is_idle(each)]
        methods += [(other, each, parts_of(each)[each.mode != PREDICTING :]) for each in own]
    tree = ModuleTree(program, [stage for _, stage, parts in methods if parts])
    lines = [
        f"class Stage({tree.base}):",
        '    """Parameter names are those of the original model, so its checkpoints load."""',
        "",
        f"    def __init__({', '.join(['self', *tree.parameters])}):",
        *(f"        {line}" for text in tree.lines() for line in _module_lines(text)),
    ]
    for owner, stage, part in ((owner, stage, part) for owner, stage, parts in methods for part in parts):
        name = method_name(owner, stage, len(stages) == 1, part)
        names, writer = variables(stage.graph), _PartWriter(program, stage, part, tree, batches.get(stage.role))
        header = f"    def {name}(self, {', '.join(['comm', *(names[node] for node in parameters(stage, part))])}):"
        lines += ["", *wrapped(header, 120), *aligned(writer.lines(), "        ")]
    return lines


def _module_lines(text: str) -> list[str]:
    """A line of `__init__`, broken inside its brackets where it is too long."""
    statement, _, note = text.partition("  # ")
    if len(text) <= 112 or statement.endswith("{"):
        return [text]
    indent = " " * (len(text) - len(text.lstrip()))
    return [*([f"{indent}# {note}"] if note else []), *wrapped(statement, 112)]


_Layer = tuple[str, tuple[str, str]]
"""A statement, the shape of its value, and the user's line that it comes from."""


class _PartWriter:
    """Writes the body of a method that runs a stage, or a part of it."""

    def __init__(self, program: PlacedProgram, stage: Stage, part: Part, tree: ModuleTree, batch: int | None) -> None:
        self._program, self._stage, self._batch, self._part = program, stage, batch, part
        self._names = variables(stage.graph)
        self._emitter = Emitter(self._names, tree.access, tree.callee)
        self._group_size = program.plan.world if program.plan.deals else program.plan.grouping(stage.role).size
        plan, role = program.plan, stage.role
        self._moved: dict[fx.Node, list[WireOp]] = defaultdict(list)  # what the first rank of a group sends in forward
        if role in plan.groups:
            for node, op in inside(program, stage, plan.roles[role][0], Action("forward", role=role)):
                self._moved[node].append(op)
        own = {plan.batch(role, rank) for rank in plan.roles.get(role, ())}
        self._own_batch = own.pop() if len(own) == 1 else None

    def lines(self) -> list[Line]:
        """Every statement with its comment: the shape, and the user's line where it is another one than above."""
        early = {n: self._emitter.expression(n) for n in filter(starts_at_once, self._stage.graph.nodes)}
        written = {n: text.removesuffix(".wait()") for n, text in early.items() if self._has(n)}
        layers = [(f"{self._names[n]} = {text}", self._note(n)) for n, text in written.items()]
        if self._part is not Part.WEIGH:
            self._emitter.folded |= {n: f"{self._names[n]}.wait()" for n in early}
        nodes = (node for node in self._stage.graph.nodes if is_computed(node) and self._has(node))
        layers += [layer for node in nodes if node not in early for layer in self._layer(node)]
        width, above = max((len(note[0]) for _, note in layers), default=0), ""
        lines: list[Line] = []
        for text, (shape, source) in layers:
            shown, above = source if source != above else "", source or above
            lines.append((text, f"{shape:{width}}  {shown}".strip()))
        returned = [self._emitter.value(node) for node in returned_by(self._stage, self._part)]
        return [*lines, (f"return {', '.join(returned)}" if returned else "return None", "")]

    def _has(self, node: fx.Node) -> bool:
        return part_of(self._stage, node) is self._part

    def _layer(self, node: fx.Node) -> list[_Layer]:
        """The statements of a node; none where it is written inside its reader."""
        if node.target is assigned:
            return self._assignment(node)
        if node.target is comm_ops.pull:
            return [self._pull(node)]
        text = self._emitter.expression(node)
        if self._folds(node, text):
            self._emitter.folded[node] = text
            return []
        return self._statement(node, text)

    def _statement(self, node: fx.Node, text: str) -> list[_Layer]:
        """A node's statement; where it is too long, the values inside it get lines of their own before it."""
        name = "" if info(node).side_effect else f"{self._names[node]} = "
        lines: list[_Layer] = []
        if len(name) + len(text) > _STATEMENT:
            for inner in [n for n in node.all_input_nodes if n in self._emitter.folded and not starts_at_once(n)]:
                lines += self._statement(inner, self._emitter.folded.pop(inner))
            text = self._emitter.expression(node)
        return [*lines, (f"{name}{text}", self._note(node))]

    def _pull(self, node: fx.Node) -> _Layer:
        """Waiting for a bucket of parameters, whose gradients are pushed."""
        k: Any = node.kwargs["bucket"]
        size = sum(self._program.tensors[name].nbytes for name in self._stage.buckets_of("push")[k])
        return f"comm.pull({k})", (f"{units.nbytes(size)} of parameters", "")

    def _assignment(self, node: fx.Node) -> list[_Layer]:
        """`y = x.clone()` and `y[key] = value`; without the copy where nothing else reads a tensor made for this."""
        before, key, value = node.args
        lines: list[_Layer] = []
        if isinstance(before, fx.Node) and list(before.users) == [node] and _is_fresh(before):
            self._names[node] = self._names[before]
        else:
            lines.append((f"{self._names[node]} = {self._emitter.receiver(before)}.clone()", ("", "")))
        statement = f"{self._names[node]}[{self._emitter.index(key)}] = {self._emitter.value(value)}"
        return [*lines, (statement, self._note(node))]

    def _folds(self, node: fx.Node, text: str) -> bool:
        """Whether a value is written inside its only reader, so that one line holds one layer."""
        if len(node.users) != 1 or len(text) > _FOLDED or info(node).side_effect or transition_of(node) is not None:
            return False
        (user,) = node.users
        changed = user.target is assigned and user.args[0] is node
        apart = info(user).layer != info(node).layer or not self._has(user) or node.name in self._stage.forward
        if user.op == "output" or user.target is comm_ops.send or changed or apart:
            return False
        between = node.next
        while between is not user:
            if info(between).side_effect:
                return False
            between = between.next
        return sum(arg is node for arg in (*user.args, *user.kwargs.values())) == 1

    def _note(self, node: fx.Node) -> tuple[str, str]:
        spec, source = info(node).spec, info(node).source
        if not isinstance(spec, TensorSpec):
            return "", source
        shape = shape_text(spec, self._own_batch if info(node).state is State.BATCH else self._batch)
        if info(node).state is State.FEATURES and self._group_size > 1:
            shape = f"{shape.removesuffix(')')}/{self._group_size})"  # a shard of the features
        if (transition := transition_of(node)) is not None:
            sent = [units.nbytes(op.sent) for op in self._moved.get(node, ())]
            source = ", ".join([str(transition), *sent])
        return shape, source


def _is_fresh(node: fx.Node) -> bool:
    """Whether the tensor was made by the line before, so that nothing else shares its memory."""
    name = op_name(node)
    is_factory = node.op == "call_function" and getattr(torch, name, None) is node.target and name in _FRESH
    is_method = node.op == "call_method" and (name in _FRESH or name.startswith("new_"))
    return node.target is assigned or is_factory or is_method


def shape_text(spec: TensorSpec, batch: int | None) -> str:
    """`(128, 9216)`, or `(b, 9216)` where the batch differs between ranks."""
    if batch is not None:
        return str(spec.at(batch))
    rows = "b" if spec.rows == 1 else f"{spec.rows}*b"
    sizes = [rows if d == spec.batch_dim else str(n) for d, n in enumerate(spec.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


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
    names = ("Neurons", "OwnModel", "Tree", "own_function", "own_model", "own_module")
    if runtime := [name for name in names if uses(lines, f"{name}(") or uses(lines, f"({name})")]:
        imports += ["", f"from splitc.runtime import {', '.join(runtime)}"]
    return imports
