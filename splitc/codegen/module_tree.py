"""Write the modules and tensors of a stage, nested and named as in the model, so that its checkpoints load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx, nn

from splitc.codegen.features import features
from splitc.ir.constructors import construction, literal
from splitc.ir.graph import info
from splitc.ir.layers import StateTensor
from splitc.ir.names import is_attribute
from splitc.ir.program import Program, Stage
from splitc.ir.regions import OwnCode, Region, is_inside, names_in
from splitc.runtime.collectives.layouts import State


class ModuleTree:
    """The modules that `Stage.__init__` constructs, and the expressions by which `Stage.forward` accesses them.

    A module that is traced through becomes a container of its children and tensors.  The stage is an nn.Module with
    attributes, or a container where its children's names cannot be attributes (an nn.Sequential's: "0", "1").
    """

    def __init__(self, program: Program, stages: Sequence[Stage]) -> None:
        held = {name for stage in stages for name in stage.tensors}
        self._held = [tensor for name, tensor in program.tensors.items() if name in held]
        self._modules: dict[str, str] = {}
        called = dict.fromkeys(path for stage in stages for path in _called(stage))
        found = {path: [root.get_submodule(path) for root in program.roots] for path in called}
        self._regions = {
            path: m.own for path, modules in found.items() for m in reversed(modules) if isinstance(m, Region)
        }
        for path, (module, *_) in found.items():
            if any(is_inside(path, each) for each in self._regions if each != path):
                continue  # training runs the region around it
            call = _own(self._regions[path]) if path in self._regions else construction(module)
            assert call is not None, path
            self._modules[path] = call
        whole = set(names_in(program.root, "")) if "" in self._regions else set[str]()
        self._whole = whole.union(*(h.names for h in self._held if not whole.isdisjoint(h.all_names)))
        self._notes: dict[str, str] = {}
        for stage, name in [(each, name) for each in stages for name in each.shards]:
            if (owner := name.rpartition(".")[0]) in self._modules:
                how = next(filter(None, (each.held_as(stage, name) for each in features())), "sharded")
                self._notes[owner] = f"  # {how}, see rankN.py"
        self._tensors = {path: h for h in self._held for path in h.all_names if not self._in_module(path)}
        used = (*self._modules, *self._tensors)
        self._inner = dict.fromkeys(path[:i] for path in used for i, c in enumerate(path) if c == ".")
        self._order = {path: i for i, (path, _) in enumerate(program.root.named_modules(remove_duplicate=False))}
        self._kinds = {path: self._kind(path) for path in ("", *self._inner)}

    @property
    def base(self) -> str:
        """The base class of the stage."""
        return self._kinds[""]

    def access(self, path: str) -> str:
        """`features.0.weight` -> `self.features["0"].weight`."""
        text, parent = "self", ""
        if not path:
            return "self.own"
        for part in path.split("."):
            child = f"{parent}.{part}" if parent else part
            kind = self._kinds.get(parent, "nn.Module")
            is_item = kind in ("nn.ModuleDict", "Tree") and child not in self._tensors
            if is_item or (kind == "nn.ParameterDict" and not is_attribute(part)):
                text += f"[{literal(part)}]"
            else:
                text = f"{text}.{part}" if is_attribute(part) else f"getattr({text}, {literal(part)})"
            parent = child
        return text

    def callee(self, node: fx.Node) -> str:
        """The module that a node calls; the communicator seeds the random numbers of a region."""
        text, draw, own = self.access(str(node.target)), info(node).draw, self._regions.get(str(node.target))
        draws = f", draws={literal(own.draws)}" if own and own.draws else ""
        draws += ", own=True" if info(node).state is State.BATCH else ""
        return text if draw is None else f"comm.own_code({text}, draw={draw}{draws})"

    @property
    def parameters(self) -> list[str]:
        """The parameters of `__init__`: the user's model or loss, of which regions are taken."""
        own = {_origin(each): each.code for each in self._regions.values()}
        return [name if code is None else f"{name}={literal(code)}" for name, code in sorted(own.items(), reverse=True)]

    def lines(self) -> list[str]:
        """The body of `__init__`."""
        origins = {_origin(own) for own in self._regions.values() if not own.is_function}
        lines = [f"{name} = own_model({name})" for name in sorted(origins)]
        if self.base in ("nn.Module", "OwnModel"):
            lines.append(f"super().__init__({self._modules.get('', '')})")
            for path in self._children(""):
                first, *rest = self._value(path)
                lines += [f"self.{path} = {first}", *rest]
                lines[-1] += self._notes.get(path, "")
        else:
            lines += ["super().__init__({", *self._entries(""), "})"]
        for path in self._tensors:
            if self._kinds[path.rpartition(".")[0]] != "nn.ParameterDict" and not self._is_tied(path):
                lines.append(self._assignment(path))
        return lines + self._ties() + self._frozen()

    # -- containers --------------------------------------------------------------------------------------------------

    def _kind(self, path: str) -> str:
        """The class of the container at `path`."""
        if path in self._regions:
            return "OwnModel"
        children = [_last(child) for child in self._children(path)]
        tensors = {_last(tensor): self._tensors[tensor] for tensor in self._tensors_of(path)}
        if children and (path or not all(map(is_attribute, children))):
            return "Tree" if any(hasattr(nn.ModuleDict, name) for name in (*children, *tensors)) else "nn.ModuleDict"
        only_parameters = all(h.parameter and not hasattr(nn.ParameterDict, name) for name, h in tensors.items())
        return "nn.ParameterDict" if path and only_parameters else "nn.Module"

    def _children(self, parent: str) -> list[str]:
        paths = [p for p in (*self._inner, *self._modules) if p and p.rpartition(".")[0] == parent and p != parent]
        return sorted(paths, key=self._order.__getitem__)

    def _tensors_of(self, parent: str) -> list[str]:
        return [path for path in self._tensors if path.rpartition(".")[0] == parent]

    def _value(self, path: str) -> list[str]:
        """The expression that constructs the module at `path`, in lines."""
        if path in self._modules:
            return [self._modules[path]]
        entries = self._entries(path)
        return [f"{self._kinds[path]}({{", *entries, "})"] if entries else [f"{self._kinds[path]}()"]

    def _entries(self, parent: str) -> list[str]:
        values = [(path, self._value(path)) for path in self._children(parent)]
        if self._kinds[parent] == "nn.ParameterDict":
            values += [
                (path, [_empty(self._tensors[path])]) for path in self._tensors_of(parent) if not self._is_tied(path)
            ]
        lines = []
        for path, (first, *rest) in values:
            lines += [f"{literal(_last(path))}: {first}", *rest]
            lines[-1] += "," + self._notes.get(path, "")
        return [f"    {line}" for line in lines]

    # -- tensors -----------------------------------------------------------------------------------------------------

    def _in_module(self, path: str) -> bool:
        return path in self._whole or any(path.startswith(f"{module}.") for module in self._modules)

    def _is_tied(self, path: str) -> bool:
        """Whether the tensor is made under another of its names."""
        return path != self._first_name(self._tensors[path])

    def _first_name(self, tensor: StateTensor) -> str:
        """The name under which the tensor is made: one inside a module, or else the first."""
        return next((name for name in tensor.all_names if self._in_module(name)), tensor.name)

    def _assignment(self, path: str) -> str:
        tensor, (owner, _, name) = self._tensors[path], path.rpartition(".")
        own = self.access(owner) if owner else "self"
        if not tensor.parameter:
            keep = "" if tensor.persistent else ", persistent=False"
            return f"{own}.register_buffer({literal(name)}, {_empty(tensor)}{keep})"
        if is_attribute(name):
            return f"{own}.{name} = {_empty(tensor)}"
        return f"{own}.register_parameter({literal(name)}, {_empty(tensor)})"

    def _ties(self) -> list[str]:
        lines = []
        for tensor in self._held:
            first = self._first_name(tensor)
            here = [n for n in tensor.all_names if n in self._tensors or self._in_module(n)]
            for owner, _, name in (name.rpartition(".") for name in here if name != first and name not in self._whole):
                own, tied = self.access(owner) if owner else "self", self.access(first)
                plain = f"{own}.{name} = {tied}"
                lines.append(plain if is_attribute(name) else f"setattr({own}, {literal(name)}, {tied})")
        return lines

    def _frozen(self) -> list[str]:
        frozen = [h for h in self._held if h.parameter and not h.requires_grad]
        if frozen and not any(h.trainable for h in self._held):
            return ["self.requires_grad_(False)  # nothing of this stage is trained"]
        return [f"{self.access(h.name)}.requires_grad_(False)" for h in frozen if self._in_module(self._first_name(h))]


def _called(stage: Stage) -> Iterator[str]:
    """The modules that a stage calls, or whose parameters it names in the call of a communication node."""
    for node in stage.graph.nodes:
        if node.op == "call_module" or info(node).is_module:
            yield str(node.target)
        elif node.op == "get_attr" and info(node).of_module:
            yield str(node.target).rpartition(".")[0]


def _origin(own: OwnCode) -> str:
    """The parameter of `__init__` that a region is taken out of."""
    return "loss" if own.path == "loss" else "model"


def _own(own: OwnCode) -> str:
    """The expression that takes a region out of the user's model or loss."""
    if own.is_function:
        return "own_function(loss)"
    path = [literal(own.path)] if own.path not in ("", "loss") else []
    options = [f"evaluating={literal(own.evaluating)}"] if own.evaluating else []
    options += ["differentiates=True"] if own.differentiates else []
    return f"own_module({', '.join([_origin(own), *path, *options])})"


def _empty(tensor: StateTensor) -> str:
    dtype = "" if tensor.dtype.is_floating_point else f", dtype={tensor.dtype}"
    empty = f"torch.empty({literal(tensor.shape)}{dtype})"
    if not tensor.parameter:
        return empty
    return f"nn.Parameter({empty})" if tensor.requires_grad else f"nn.Parameter({empty}, requires_grad=False)"


def _last(path: str) -> str:
    return path.rpartition(".")[2]
