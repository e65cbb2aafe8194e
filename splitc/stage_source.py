"""Write the `Stage` module of a role: its parameters under their original names, and its forward, one layer a line."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx, nn

from splitc import comm_ops
from splitc.constructors import construction
from splitc.emit import RESERVED, Emitter
from splitc.program import Holding, Program, Stage, TensorSpec

_WIDTH = 76


def stage_class(program: Program, stage: Stage, batch: int | None) -> tuple[list[str], list[str]]:
    """Lines of the class, and the names that a step gives to what its forward returns.

    batch: examples in the shape comments; None writes `b`, where the role's ranks differ.
    """
    names = variables(stage.graph)
    tree = _Tree(program, stage)
    emitter = Emitter(names, tree.access)
    lines = ["class Stage(nn.Module):"]
    lines += ['    """Parameter names are those of the original model, so its checkpoints load."""', ""]
    lines += ["    def __init__(self):", "        super().__init__()", *("        " + line for line in tree.lines()), ""]
    inputs = [names[node] for node in stage.graph.nodes if node.op == "placeholder" and _is_read(node)]
    inputs += [names[node] for node in stage.graph.nodes if node.target is comm_ops.recv]
    header = f"    def forward(self, {', '.join(['rank', *inputs])}):"
    body = _forward(stage, emitter, names, batch)
    outgoing = [cut.name for cut in stage.sends if cut.value not in stage.inputs]
    returned = [emitter.value(_sent(stage, cut).args[0]) for cut in outgoing]
    if stage.has_loss:
        output = next(node for node in stage.graph.nodes if node.op == "output")
        returned.append(emitter.value(output.args[0]))
    body.append((f"return {', '.join(returned)}" if returned else "return None", ""))
    lines += [header, *aligned(body, "        ")]
    return lines, outgoing + (["loss"] if stage.has_loss else [])


def aligned(body: list[tuple[str, str]], indent: str) -> list[str]:
    """Statements with their comments in one column where they are not too long for it."""
    column = min(max((len(text) for text, note in body if note), default=0), _WIDTH)
    return [f"{indent}{text:<{column}}  # {note}" if note else f"{indent}{text}" for text, note in body]


def forward_inputs(stage: Stage) -> list[str]:
    """The arguments of `Stage.forward` after `rank`: inputs that it reads, then received values."""
    names = variables(stage.graph)
    reads = [names[node] for node in stage.graph.nodes if node.op == "placeholder" and _is_read(node)]
    return reads + [cut.name for cut in stage.receives]


def variables(graph: fx.Graph) -> dict[fx.Node, str]:
    """A Python name for every node; received values are called as their cut."""
    names: dict[fx.Node, str] = {}
    taken = set(RESERVED)
    for node in graph.nodes:
        name = node.meta["cut"].name if node.target is comm_ops.recv else node.name
        while name in taken:
            name += "_"
        taken.add(name)
        names[node] = name
    return names


def _is_read(node: fx.Node) -> bool:
    return any(user.target is not comm_ops.send for user in node.users)


def _sent(stage: Stage, cut: str) -> fx.Node:
    return next(n for n in stage.graph.nodes if n.target is comm_ops.send and n.kwargs["cut"] == cut)


def _forward(stage: Stage, emitter: Emitter, names: dict[fx.Node, str], batch: int | None) -> list[tuple[str, str]]:
    """(statement, comment) of every layer's line."""
    body: list[tuple[str, str]] = []
    for node in stage.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node.target in (comm_ops.send, comm_ops.recv, comm_ops.all_reduce):
            continue
        text = emitter.expression(node)
        if _folds(node, text):
            emitter.folded[node] = text
            continue
        statement = text if node.target is operator.setitem else f"{names[node]} = {text}"
        body.append((statement, _note(node, batch)))
    return body


def _folds(node: fx.Node, text: str) -> bool:
    """Whether a value is written inside its only reader, so that one line holds one layer."""
    if len(node.users) != 1 or len(text) > _WIDTH - 24:
        return False
    (user,) = node.users
    if user.op == "output" or user.target in (comm_ops.send, operator.setitem) or user.meta.get("layer") != node.meta.get("layer"):
        return False
    uses = sum(arg is node for arg in user.args) + sum(arg is node for arg in user.kwargs.values())
    between = node.next
    while between is not user:
        if between.target is operator.setitem or (between.op == "call_method" and str(between.target).endswith("_")):
            return False
        between = between.next
    return uses == 1


def _note(node: fx.Node, batch: int | None) -> str:
    spec = node.meta.get("spec")
    source = node.meta["source"]
    if not isinstance(spec, TensorSpec):
        return str(source)
    return f"{shape_text(spec, batch):20}  {source}"


def shape_text(spec: TensorSpec, batch: int | None) -> str:
    """`(128, 9216)`, or `(b, 9216)` where the batch differs between ranks."""
    if batch is not None:
        return str(spec.at(batch))
    rows = "b" if spec.rows == 1 else f"{spec.rows}*b"
    sizes = [rows if d == spec.batch_dim else str(n) for d, n in enumerate(spec.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


class _Tree:
    """The modules, parameters and buffers of a stage, nested as in the model."""

    def __init__(self, program: Program, stage: Stage) -> None:
        self._program, self._stage = program, stage
        self._modules: dict[str, str] = {}
        self._tensors: dict[str, Holding] = {}
        by_name = {alias: h for h in program.holdings.values() for alias in (h.name, *h.names)}
        for node in stage.graph.nodes:
            if node.op == "call_module":
                module = program.root.get_submodule(node.target)
                call = construction(module)
                assert call is not None, node.target
                self._modules[node.target] = call
            elif node.op == "get_attr":
                self._tensors[node.target] = by_name[node.target]
        self._tensors = {path: h for path, h in self._tensors.items() if path.rpartition(".")[0] not in self._modules}
        self._inner: set[str] = set()
        for path in (*self._modules, *self._tensors):
            while (path := path.rpartition(".")[0]) and path not in self._modules:
                self._inner.add(path)
        self._order = {path: i for i, (path, _) in enumerate(program.root.named_modules())}

    def access(self, path: str) -> str:
        """`features.0.weight` -> `self.features["0"].weight`."""
        text, done = "self", ""
        for part in path.split("."):
            inside = done in self._inner and (f"{done}.{part}" in self._modules or f"{done}.{part}" in self._inner)
            text += f'["{part}"]' if inside else f".{part}"
            done = f"{done}.{part}" if done else part
        return text

    def lines(self) -> list[str]:
        lines = [line for path in self._children("") for line in self._define(path)]
        for path, holding in self._tensors.items():
            lines.append(self._tensor(path, holding))
        return (lines + self._ties() + self._frozen()) or ["pass"]

    def _children(self, parent: str) -> list[str]:
        paths = [p for p in (*self._inner, *self._modules) if p.rpartition(".")[0] == parent]
        return sorted(paths, key=lambda p: self._order[p])

    def _define(self, path: str) -> list[str]:
        if path in self._modules:
            return [f"self.{path} = {self._modules[path]}"]
        return [f"self.{path} = {self._container(path)}({{", *self._entries(path, 1), "})"] if self._children(path) else [
            f"self.{path} = {self._container(path)}()"]

    def _container(self, path: str) -> str:
        names = [p.rpartition(".")[2] for p in (*self._children(path), *self._tensors) if p.rpartition(".")[0] == path]
        return "Tree" if any(hasattr(nn.ModuleDict, name) for name in names) else "nn.ModuleDict"

    def _entries(self, parent: str, depth: int) -> list[str]:
        pad = "    " * depth
        lines = []
        for path in self._children(parent):
            key = path.rpartition(".")[2]
            if path in self._modules:
                lines.append(f'{pad}"{key}": {self._modules[path]},')
            elif self._children(path):
                lines += [f'{pad}"{key}": {self._container(path)}({{', *self._entries(path, depth + 1), f"{pad}}}),"]
            else:
                lines.append(f'{pad}"{key}": {self._container(path)}(),')
        return lines

    def _tensor(self, path: str, holding: Holding) -> str:
        owner, _, name = path.rpartition(".")
        own = self.access(owner) if owner else "self"
        dtype = "" if holding.dtype.is_floating_point else f", dtype={holding.dtype}"
        empty = f"torch.empty({holding.shape}{dtype})"
        if holding.parameter:
            return f"{own}.{name} = nn.Parameter({empty})"
        keep = "" if holding.persistent else ", persistent=False"
        return f'{own}.register_buffer("{name}", {empty}{keep})'

    def _ties(self) -> list[str]:
        here = {f"{m}.{n}" for m in self._modules for n, _ in self._program.root.get_submodule(m).named_parameters()}
        here |= set(self._tensors)
        lines = []
        for name in self._stage.holdings:
            aliases = [a for a in dict.fromkeys((name, *self._program.holdings[name].names)) if a in here]
            lines += [f"{self.access(alias)} = {self.access(aliases[0])}" for alias in aliases[1:]]
        return lines

    def _frozen(self) -> list[str]:
        held = [self._program.holdings[h] for h in self._stage.holdings]
        frozen = [h for h in held if h.parameter and not h.requires_grad]
        if frozen and not any(h.trainable for h in held):
            return ["self.requires_grad_(False)                # frozen in the model"]
        return [f"{self.access(h.name)}.requires_grad_(False)" for h in frozen]


def parameter_count(program: Program, stage: Stage) -> int:
    """Parameters that one rank of the role holds."""
    return sum(math.prod(program.holdings[h].shape) for h in stage.holdings if program.holdings[h].parameter)


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
    if uses(lines, "Tree("):
        imports += ["", "from splitc.runtime import Tree"]
    return imports
