"""Write graph nodes as readable Python: `F.max_pool2d(F.relu(self.features["0"](x)), 3, stride=2)`."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx

from splitc.ir.comm_ops import global_weight
from splitc.ir.constructors import literal
from splitc.ir.graph import changes_statistics
from splitc.ir.op_names import function_name

_SIGNS: tuple[dict[Any, str], ...] = (  # by precedence, the loosest first
    {operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">="},
    {operator.or_: "|"},
    {operator.xor: "^"},
    {operator.and_: "&"},
    {operator.lshift: "<<", operator.rshift: ">>"},
    {operator.add: "+", operator.sub: "-"},
    {operator.mul: "*", operator.truediv: "/", operator.floordiv: "//", operator.mod: "%", operator.matmul: "@"},
    {},  # the unary ones
    {operator.pow: "**"},
)
_BINARY = {function: (sign, tightness) for tightness, signs in enumerate(_SIGNS) for function, sign in signs.items()}
_UNARY = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
_TIGHT = 7  # the precedence of unary operators; names and calls bind tighter than any operator
_DEFAULTS: dict[str, dict[str, Any]] = {  # of functions written in C, which have no inspectable signature
    "max_pool2d": {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    "max_pool1d": {"padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False},
    "avg_pool2d": {"padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None},
    "gelu": {"approximate": "none"},
}


class Emitter:
    """Expressions of one role's graph.

    names: node -> its variable.  path: path of a tensor -> `self...`.  callee: call of a module -> what is called.
    """

    def __init__(
        self, names: Mapping[fx.Node, str], path: Callable[[str], str], callee: Callable[[fx.Node], str]
    ) -> None:
        self._names, self._path, self._callee = names, path, callee
        self.folded: dict[fx.Node, str] = {}

    def value(self, item: Any, tightness: int = -1) -> str:
        """An argument as source, in parentheses where the operator around it has a higher precedence."""
        if isinstance(item, fx.Node):
            text = self.folded.get(item)
            if text is None:
                return self._path(str(item.target)) if item.op == "get_attr" else self._names[item]
            return f"({text})" if _tightness(item) < tightness else text
        if isinstance(item, slice):
            return f"slice({', '.join(self.value(v) for v in (item.start, item.stop, item.step))})"
        if isinstance(item, (tuple, list)):
            inner = ", ".join(self.value(v) for v in item)
            return f"[{inner}]" if isinstance(item, list) else f"({inner}{',' if len(item) == 1 else ''})"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{literal(k)}: {self.value(v)}" for k, v in item.items()) + "}"
        if item is Ellipsis:
            return "..."
        is_negative = isinstance(item, (int, float)) and not isinstance(item, bool) and item < 0
        return f"({literal(item)})" if is_negative and tightness > _TIGHT else literal(item)

    def expression(self, node: fx.Node) -> str:
        """The right-hand side of `node`."""
        target: Any = node.target
        if node.op == "call_module":
            return f"{self._callee(node)}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            args = node.args[1:2] if target == "flatten" and node.args[2:] == (-1,) else node.args[1:]
            return f"{self.receiver(node.args[0])}.{target}({self._arguments(args, node.kwargs)})"
        if target in _BINARY:
            sign, tightness = _BINARY[target]
            is_power = target is operator.pow
            left = self.value(node.args[0], tightness + (is_power or tightness == 0))
            return f"{left} {sign} {self.value(node.args[1], tightness + 1)}"
        if target in _UNARY:
            return f"{_UNARY[target]}{self.value(node.args[0], _TIGHT)}"
        if target is operator.getitem:
            return f"{self.receiver(node.args[0])}[{self.index(node.args[1])}]"
        if target is getattr:
            return f"{self.receiver(node.args[0])}.{node.args[1]}"
        name = function_name(target)
        call = f"{name}({self._arguments(node.args, _explicit_arguments(node, name))})"
        return call + ".wait()" * (target is global_weight)

    def receiver(self, item: Any) -> str:
        """The object that a method is called on."""
        text = self.value(item, _TIGHT + 2)
        return f"({text})" if isinstance(item, (int, float)) and not text.startswith("(") else text

    def index(self, item: Any) -> str:
        """The text between the brackets of an index."""
        if isinstance(item, tuple) and item:
            return ", ".join(self._bounds(each) for each in item) + ("," if len(item) == 1 else "")
        return self._bounds(item)

    def _bounds(self, item: Any) -> str:
        if not isinstance(item, slice):
            return self.value(item)
        parts = ["" if v is None else self.value(v) for v in (item.start, item.stop)]
        return ":".join(parts) + ("" if item.step is None else f":{self.value(item.step)}")

    def _arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        named = [f"{k}={self.value(v)}" for k, v in kwargs.items()]
        return ", ".join([*map(self.value, args), *named])


def _tightness(node: fx.Node) -> int:
    """The precedence of a node's expression."""
    if node.target in _BINARY:
        return _BINARY[node.target][1]
    return _TIGHT if node.target in _UNARY else _TIGHT + 2


def _explicit_arguments(node: fx.Node, name: str) -> dict[str, Any]:
    """The keyword arguments that differ from their defaults.

    `training` of a normalisation that updates running statistics becomes `self.training`.
    """
    target: Any = node.target
    try:
        defaults = {k: p.default for k, p in inspect.signature(target).parameters.items() if p.default is not p.empty}
    except (TypeError, ValueError):
        defaults = {}
    defaults = {**_DEFAULTS.get(name.rpartition(".")[2], {}), **defaults}

    def is_default(key: str, value: Any) -> bool:
        known = key in defaults and type(value) is type(defaults[key]) and value == defaults[key]
        return known or key == "_stacklevel"

    explicit: dict[str, Any] = {k: v for k, v in node.kwargs.items() if not is_default(k, v)}
    if changes_statistics(node):
        explicit["training" if target is F.batch_norm else "use_input_stats"] = _WhileTraining()
    return explicit


class _WhileTraining:
    """Written as `self.training`."""

    def __repr__(self) -> str:
        return "self.training"
