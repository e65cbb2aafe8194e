"""Proxies of tensors and of batch-dependent numbers, on which a model's Python runs.

A proxy holds its node and its values at the batch sizes of the trace, so `x.shape`, `isinstance`, unpacking and
branches on shapes have their real results; its tracer records every operation on it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import fx

from splitc.capture.trace.asserts import passing_truth
from splitc.ir.graph import info

_ARITHMETIC = ("add", "sub", "mul", "truediv", "mod", "floordiv", "pow", "matmul", "xor", "lshift", "rshift")
BINARY = {name: getattr(operator, name) for name in _ARITHMETIC} | {"and": operator.and_, "or": operator.or_}
IN_PLACE = {getattr(operator, f"i{name}"): function for name, function in BINARY.items()}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_UNARY = {name: getattr(operator, name) for name in ("neg", "pos", "invert", "abs")}
_ITEMS = {"getitem": operator.getitem, "setitem": operator.setitem}
_DUNDERS = {f"__{name}__": function for name, function in (BINARY | _COMPARISONS | _UNARY | _ITEMS).items()}
_REFLECTED = {f"__r{name}__": function for name, function in (*BINARY.items(), ("div", operator.truediv))}
_METHODS = {"div": operator.truediv, "remainder": operator.mod}  # what `/` and `%` call on a plain tensor


class Recorder(Protocol):
    """The interface of a tracer that proxies use.  queries: answers what is asked of sizes, attributes and asserts."""

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def torch_call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def plain(self, proxy: Any, what: str) -> Any: ...

    @property
    def queries(self) -> Any: ...

    def lost(self, function: Any) -> NoReturn: ...


class Traced:
    """A traced value.  `_values`: one for each batch size, two of a tensor, more of a number."""

    _tracer: Recorder
    _node: fx.Node
    _values: tuple[Any, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(value for value in leaves((args, kwargs)) if is_proxy(value))
        return found._tracer.torch_call(func, args, kwargs or {})

    def __getattribute__(self, name: str) -> Any:
        if name in ("_tracer", "_node", "_values") or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        if name == "shape" and type(self) is TracedTensor:
            return self._tracer.queries.sizes(self)
        found = self._tracer.queries.peek(self._values[0], name)
        if callable(found) and not isinstance(found, torch.Tensor):
            return lambda *args, **kwargs: self._tracer.record("call_method", name, (self, *args), kwargs)
        return self._tracer.record("call_function", getattr, (self, name), {})

    def __bool__(self) -> bool:
        if type(self) is TracedNumber:  # which batches take the branch is found as for comparisons
            return bool(self._tracer.record("call_function", operator.ne, (self, 0), {}))
        truth = passing_truth(sys._getframe(1))
        return (
            bool(self._tracer.plain(self, "a branch")) if truth is None else self._tracer.queries.assumed(self, truth)
        )

    def __int__(self) -> int:
        return int(self._tracer.plain(self, "int()"))

    def __index__(self) -> int:
        return int(self._tracer.plain(self, "range() or an index"))

    def __float__(self) -> float:
        return float(self._tracer.plain(self, "float()"))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<{self._node.name} of {info(self._node).source}>"

    def __format__(self, spec: str) -> str:
        return repr(self)


def _recording(function: Callable[..., Any], reflected: bool = False) -> Callable[..., Any]:
    def forward(self: Traced, *args: Any) -> Any:
        return self._tracer.record("call_function", function, (self, *args), {})

    def backward(self: Traced, other: Any) -> Any:
        return self._tracer.record("call_function", function, (other, self), {})

    return backward if reflected else forward


for _name, _function in _DUNDERS.items():
    setattr(Traced, _name, _recording(_function))
for _name, _function in BINARY.items():
    setattr(Traced, f"__r{_name}__", _recording(_function, reflected=True))
    setattr(Traced, f"__i{_name}__", _recording(getattr(operator, f"i{_name}")))


class TracedTensor(Traced, torch.Tensor):  # type: ignore[misc]
    """A traced tensor without data; C++ code that would read it without the tracer is refused."""

    @staticmethod
    def __new__(
        cls: type[TracedTensor], tracer: Recorder, node: fx.Node, values: tuple[torch.Tensor, ...]
    ) -> TracedTensor:
        like = values[0]
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.__dict__.update(_tracer=tracer, _node=node, _values=values)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        next(value for value in leaves((args, kwargs)) if is_proxy(value))._tracer.lost(func)

    def __setattr__(self, name: str, value: Any) -> None:
        self._tracer.record("call_function", setattr, (self, name, value), {})

    def __len__(self) -> int:
        return int(self._tracer.plain(self._tracer.queries.sizes(self)[0], "a loop over a tensor"))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(self.__len__())])

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.plain(self, "numpy")


class TracedNumber(Traced):
    """A number that depends on the batch size, or the device of a tensor."""

    def __init__(self, tracer: Recorder, node: fx.Node, values: tuple[Any, ...]) -> None:
        self.__dict__.update(_tracer=tracer, _node=node, _values=values)

    @property
    def __class__(self) -> type:  # isinstance(n, int) holds in the user's code
        return type(self._values[0])

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a traced value cannot be changed")


class Sizes(tuple[Any, ...]):
    """A `torch.Size` with entries that depend on the batch."""

    __slots__ = ()

    @property
    def __class__(self) -> type:
        return torch.Size

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a traced value cannot be changed")

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Sizes(found) if isinstance(index, slice) else found

    def numel(self) -> Any:
        """The product of the entries."""
        return math.prod(self)


def operation(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any, tuple[Any, ...]]:
    """op, target and arguments of the node for a function that `__torch_function__` received."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        accessor = getattr if name == "__get__" else setattr
        return "call_function", accessor, (args[0], function.__self__.__name__, *args[1:])
    if getattr(torch.Tensor, name, None) is not function and function is not torch.Tensor.__pow__:
        return "call_function", function, args
    if name in _REFLECTED:
        return "call_function", _REFLECTED[name], (args[1], args[0])
    written_as_operator = _DUNDERS.get(name) or (
        _METHODS.get(name, BINARY.get(name)) if len(args) == 2 and not kwargs else None
    )
    return ("call_function", written_as_operator, args) if written_as_operator else ("call_method", name, args)


def is_proxy(value: Any) -> bool:
    """Whether the value is a proxy; `isinstance` would see the type that a TracedNumber stands for."""
    return type(value) in (TracedTensor, TracedNumber)


def map_tree(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` on every leaf of nested tuples, lists, dicts and slices; tuples of any kind become plain ones."""
    kind = type(tree)
    if kind is slice:
        return slice(map_tree(tree.start, function), map_tree(tree.stop, function), map_tree(tree.step, function))
    if kind is dict:
        return {key: map_tree(value, function) for key, value in tree.items()}
    if kind is list:
        return [map_tree(value, function) for value in tree]
    if issubclass(kind, tuple):
        return tuple(map_tree(value, function) for value in tree)
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    """Every leaf of nested tuples, lists, dicts and slices."""
    found: list[Any] = []
    map_tree(tree, found.append)
    return found
