"""Write graph nodes as Python a person would write: `F.max_pool2d(F.relu(self.features["0"](x)), 3, stride=2)`."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc import comm_ops
from splitc.constructors import literal
from splitc.errors import CaptureError

_BINARY = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.eq: "==", operator.ne: "!=", operator.lt: "<",
    operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.and_: "&", operator.or_: "|", operator.xor: "^",
    operator.lshift: "<<", operator.rshift: ">>",
}
_UNARY = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
_BUILTIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "max_pool2d": {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    "max_pool1d": {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    "avg_pool2d": {"padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None},
}
RESERVED = {"rank", "self", "stage", "step", "evaluate", "torch", "nn", "F", "Stage", "BUCKETS"}


@cache
def _functional_names() -> dict[int, str]:
    return {id(value): name for name, value in vars(F).items() if callable(value) and not name.startswith("_")}


def function_name(target: Callable[..., Any]) -> str:
    """How generated code calls a function.  Raises CaptureError for one that it could not import."""
    if target in comm_ops.OPS:
        return f"rank.{target.__name__}"
    if id(target) in _functional_names():
        return f"F.{_functional_names()[id(target)]}"
    name = getattr(target, "__name__", "")
    for module, prefix in ((torch, "torch"), (torch.linalg, "torch.linalg"), (torch.fft, "torch.fft"), (torch.special, "torch.special")):
        if getattr(module, name, None) is target:
            return f"{prefix}.{name}"
    if getattr(operator, name, None) is target:
        return f"operator.{name}"
    if target is getattr:
        return "getattr"
    raise CaptureError(f"generated code cannot call {name or target!r}: it is no function of torch; "
                       f"write it with torch operations")


class Emitter:
    """Expressions of one role's graph.  `names`: node -> its variable; `paths`: module or tensor path -> `self...`."""

    def __init__(self, names: Mapping[fx.Node, str], path: Callable[[str], str]) -> None:
        self._names, self._path = names, path
        self.folded: dict[fx.Node, str] = {}

    def value(self, item: Any, inside: bool = False) -> str:
        """An argument as source; `inside` an operator, where a folded expression needs parentheses."""
        if isinstance(item, fx.Node):
            text = self.folded.get(item)
            if text is None:
                return self._path(str(item.target)) if item.op == "get_attr" else self._names[item]
            simple = item.target not in _BINARY and item.target not in _UNARY
            return text if simple or not inside else f"({text})"
        if isinstance(item, slice):
            return f"slice({', '.join(self.value(v) for v in (item.start, item.stop, item.step))})"
        if isinstance(item, (tuple, list)):
            inner = ", ".join(self.value(v) for v in item)
            if isinstance(item, list):
                return f"[{inner}]"
            return f"({inner}{',' if len(item) == 1 else ''})"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{literal(k)}: {self.value(v)}" for k, v in item.items()) + "}"
        if item is Ellipsis:
            return "..."
        return literal(item)

    def expression(self, node: fx.Node) -> str:
        """The right-hand side of `node`."""
        target: Any = node.target
        if node.op == "call_module":
            return f"{self._path(target)}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self._receiver(node.args[0])}.{target}({self._arguments(node.args[1:], node.kwargs)})"
        if target in _BINARY:
            left, right = (self.value(arg, inside=True) for arg in node.args)
            return f"{left} {_BINARY[target]} {right}"
        if target in _UNARY:
            return f"{_UNARY[target]}{self.value(node.args[0], inside=True)}"
        if target is operator.getitem:
            return f"{self._receiver(node.args[0])}[{self._index(node.args[1])}]"
        if target is operator.setitem:
            return f"{self._receiver(node.args[0])}[{self._index(node.args[1])}] = {self.value(node.args[2])}"
        if target is getattr:
            return f"{self._receiver(node.args[0])}.{node.args[1]}"
        name = function_name(target)
        return f"{name}({self._arguments(*_without_defaults(target, name, node.args, node.kwargs))})"

    def _receiver(self, item: Any) -> str:
        text = self.value(item, inside=True)
        return text if not isinstance(item, (int, float)) else f"({text})"

    def _index(self, item: Any) -> str:
        if isinstance(item, tuple):
            return ", ".join(map(self._index, item))
        if isinstance(item, slice):
            parts = ["" if v is None else self.value(v) for v in (item.start, item.stop)]
            return ":".join(parts) + ("" if item.step is None else f":{self.value(item.step)}")
        return self.value(item)

    def _arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        named = [f"{k}={self.value(v)}" for k, v in kwargs.items()]
        return ", ".join([*map(self.value, args), *named])


def _without_defaults(target: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any,
dict[str, Any]]:
    """Leave out keyword arguments that have their default value."""
    try:
        defaults = {k: p.default for k, p in inspect.signature(target).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):
        defaults = {}
    defaults = {**_BUILTIN_DEFAULTS.get(name.rpartition(".")[2], {}), **defaults}

    def is_default(key: str, value: Any) -> bool:
        known = key in defaults and not isinstance(value, fx.Node)
        return known and type(value) is type(defaults[key]) and bool(value == defaults[key])

    return args, {k: v for k, v in kwargs.items() if not is_default(k, v)}
