"""Find the smallest modules that hold what cannot be traced; these stay the user's own code.

When the trace fails inside a module, the module becomes a region and the model is traced again; where its call cannot
be a node of a graph, the module around it becomes one, and at last the whole model.  `region_runs` sees what a region
returns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.capture.example.example import LOSS, Example
from splitc.capture.refusals import Failure
from splitc.capture.regions.module_calls import intercepted
from splitc.capture.regions.region_runs import Counter, Never, NoRegion, Runs
from splitc.errors import CaptureError
from splitc.ir.graph import is_region
from splitc.ir.regions import OwnCode, Region, is_inside
from splitc.runtime.own_code import OwnFunction, adopt_plain_tensors
from splitc.runtime.seeded.mode import running
from splitc.runtime.weights import named_tensors


def with_loss_module(example: Example) -> Example:
    """The example with a module for its loss."""
    if example.loss is None or isinstance(example.loss, nn.Module):
        return example
    return replace(example, loss=OwnFunction(example.loss))


@contextmanager
def own_draws(model: nn.Module, graph: fx.Graph | None) -> Iterator[None]:
    """Let the regions of a model draw, while it runs under a SeededRandom, what they draw as nodes of `graph`."""
    paths = {str(node.target) for node in (() if graph is None else graph.nodes) if is_region(node)}
    modules = {model.get_submodule(path) for path in paths if path != LOSS or hasattr(model, LOSS)}
    with intercepted(modules, _drawing) if modules else nullcontext():
        yield


def _drawing(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    mode = running()
    with nullcontext() if mode is None else mode.region():
        return call(*args, **kwargs)


@dataclass
class Regions:
    """The regions of a model, found one failed trace after the other.

    code: where the model's Python can be imported, see `OwnCode`.  counter: counts what regions compute.
    """

    model: nn.Module
    example: Example
    autocast: torch.dtype | None
    code: str | None
    counter: Counter | None
    found: dict[str, OwnCode] = field(default_factory=dict)
    _failures: list[Failure] = field(default_factory=list)
    _keeps: Collection[str] | None = None

    def add(self, failure: Failure, error: CaptureError) -> None:
        """Make the module of a failure a region, or the smallest one around it that can be.  Raises `error` otherwise.

        Modules of the same class that failed at the same line become regions together.
        """
        paths = [failure.path]
        if any((f.kind, f.line) == (failure.kind, failure.line) for f in self._failures):
            paths += [path for path, module in self.model.named_modules() if type(module) is failure.kind]
        self._failures.append(failure)
        own = getattr(self.model, LOSS, None)
        is_loss = failure.path.split(".")[0] == LOSS and not isinstance(own, nn.Module)
        if is_loss and hasattr(self.model, LOSS):
            why = f"the loss stays your own code only where the model has no attribute {LOSS!r}; rename that"
            raise CaptureError(f"{error}; {why}") from error
        path: str = LOSS if is_loss else failure.path
        reason: NoRegion | None = None
        paths = [path] if is_loss else paths
        while path in self.found or (reason := self._try(path, paths, str(error))):
            if path in ("", LOSS) or isinstance(reason, Never):
                more = f"; nor can it stay the user's own code: {reason}" if reason else ""
                raise CaptureError(f"{error}{more}") from error
            path = path.rpartition(".")[0]
            paths = [path]

    @property
    def notes(self) -> list[str]:
        """Sentences for the report."""
        known = named_tensors(self.example.root(self.model))
        kept = sorted({name for own in self.found.values() for name in own.keeps if name not in known})
        text = "goes from batch to batch, of evaluation too, and into no checkpoint, as it is in no state_dict"
        return [f"{name} {text}: a run that resumes begins with that of a new model." for name in kept]

    def keeper(self, left: Mapping[str, str]) -> Failure | None:
        """The first module that keeps in an attribute what its next forward uses.  left: attributes -> the line."""
        if left and self._keeps is None:
            try:
                example = with_loss_module(self.example)
                self._keeps = Runs(self.model, example, self.autocast, [], self.counter).keeps.keys()
            except (CaptureError, NoRegion):  # validation says what differs
                self._keeps = ()
        for name in sorted(left.keys() & (self._keeps or ())):
            path = name.rpartition(".")[0]
            return Failure(path, type(self.example.root(self.model).get_submodule(path)), left[name])
        return None

    def stand_in(self, root: nn.Module, mode: FakeTensorMode) -> nn.Module:
        """Put a `Region` in place of each region of a fake copy of the model."""
        loss = None if hasattr(self.model, LOSS) else root._modules.pop(LOSS, None)
        for path, own in self.found.items():
            module = loss if loss is not None and path == LOSS else root.get_submodule(path)
            assert module is not None
            adopt_plain_tensors(module, mode.from_tensor)
            region = Region(module, own)
            loss = region if module is loss else loss
            for parent in list(root.modules()):
                parent._modules.update({name: region for name, each in parent._modules.items() if each is module})
            root = region if module is root else root
        if loss is not None:
            root._modules[LOSS] = loss
        return root

    def _try(self, path: str, paths: list[str], why: str) -> NoRegion | None:
        """Make `path` a region, and those of `paths` that can be; the reason when `path` cannot be one."""
        outer = [p for p in self.found if p != LOSS]
        paths = [p for p in dict.fromkeys(paths) if p == path or not any(is_inside(p, o) for o in outer)]
        try:
            seen = Runs(self.model, with_loss_module(self.example), self.autocast, paths, self.counter)
            made = {path: seen.region(path, why, self._origin(path))}
        except NoRegion as reason:
            return reason
        for other in paths[1:]:
            try:
                made[other] = seen.region(other, why, self._origin(other))
            except NoRegion:
                continue
        self.found = {p: own for p, own in self.found.items() if not any(is_inside(p, new) for new in made)} | made
        return None

    def _origin(self, path: str) -> str | None:
        return importable(self.example.loss) if path == LOSS and not hasattr(self.model, LOSS) else self.code


def importable(value: Any) -> str | None:
    """Where a class, a function or a module-level object can be imported: "package.module:name"; None: nowhere."""
    for name in (getattr(value, "__module__", None), type(value).__module__):
        if name is None or name == "__main__" or name not in sys.modules:
            continue
        names = [getattr(value, "__qualname__", "")] + [n for n, v in vars(sys.modules[name]).items() if v is value]
        for each in names:
            if each and getattr(sys.modules[name], each, None) is value:
                return f"{name}:{each}"
    return None
