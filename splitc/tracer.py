"""Record what a model's Python does as a torch.fx graph, on fake tensors of two batch sizes at once.

Every proxy carries its value at both batch sizes.  That answers what a plain symbolic tracer cannot: `x.shape`,
`len(x)`, `B, C = x.shape` and branches on shapes have their real results; a number that is the same at both sizes is
a constant, one that differs depends on the batch and stays in the graph, and Python that needs such a number as a plain
one (`range(x.size(0))`) is refused at that line instead of baking the example's batch size into the program.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode

from splitc.errors import CaptureError

_LIBRARY = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(mock.__file__).parent))
_CALLER = str(Path(__file__).with_name("capture.py"))
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
_DATA = "its value depends on the data, so there is no one graph for all batches; use torch.where or masks"


def user_line() -> str:
    """`file.py:12` of the innermost frame that is neither torch's nor splitc's; "loss" for a loss of torch's own."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CALLER:
        if not frame.f_code.co_filename.startswith((*_LIBRARY, "<")):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "loss"


class Proxy:
    """A value of the traced program: its node, and what it is at the two batch sizes."""

    def __init__(self, tracer: Tracer, node: fx.Node, values: tuple[Any, Any]) -> None:
        self._tracer, self._node, self._values = tracer, node, values

    @property
    def __class__(self) -> type:  # isinstance(x, torch.Tensor) holds in user code
        return type(self._values[0])

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a traced value cannot be changed")

    def __repr__(self) -> str:
        return f"<{self._node.name} at {self._node.meta.get('source')}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = _find_tracer((args, kwargs))
        assert tracer is not None
        return tracer.torch_call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._values[0], name)  # AttributeError as the real value raises it
        if callable(found) and not isinstance(found, torch.Tensor):
            return lambda *args, **kwargs: self._tracer.record("call_method", name, (self, *args), kwargs)
        return self._tracer.record("call_function", getattr, (self, name), {})

    def _plain(self, what: str) -> Any:
        """The value as plain Python, when it is the same at every batch size."""
        return self._tracer.plain(self, what)

    def __bool__(self) -> bool:
        return bool(self._plain("a branch"))

    def __int__(self) -> int:
        return int(self._plain("int()"))

    __index__ = __int__

    def __float__(self) -> float:
        return float(self._plain("float()"))

    def __len__(self) -> int:
        first, second = map(len, self._values)
        if first != second:
            self._tracer.refuse_batch(self._node, "len()")
        return first

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    def __hash__(self) -> int:
        return id(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._tracer.record("call_function", operator.setitem, (self, key, value), {})


def _operator(name: str, reflected: bool) -> Callable[..., Any]:
    target = getattr(operator, name if name not in ("and", "or") else f"{name}_")

    def forward(self: Proxy, *args: Any) -> Any:
        return self._tracer.record("call_function", target, (self, *args), {})

    def backward(self: Proxy, other: Any) -> Any:
        return self._tracer.record("call_function", target, (other, self), {})

    return backward if reflected else forward


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and", "or", "xor")
for _name in (*_BINARY, "eq", "ne", "lt", "le", "gt", "ge", "getitem", "neg", "pos", "invert", "abs"):
    setattr(Proxy, f"__{_name}__", _operator(_name, reflected=False))
for _name in _BINARY:
    setattr(Proxy, f"__r{_name}__", _operator(_name, reflected=True))
    # `x += y` is recorded as `x = x + y`: the same values and gradients without writing into a graph value
    setattr(Proxy, f"__i{_name}__", _operator(_name, reflected=False))
_DUNDERS = {f"__{p}{n}__": (getattr(operator, n if n not in ("and", "or") else f"{n}_"), p == "r")
            for n in (*_BINARY, "eq", "ne", "lt", "le", "gt", "ge", "getitem", "neg", "invert", "abs") for p in ("", "r", "i")}


def _find_tracer(tree: Any) -> Tracer | None:
    found: list[Tracer] = []

    def look(value: Any) -> Any:
        if type(value) is Proxy:
            found.append(value._tracer)
        return value

    _map(tree, look)
    return found[0] if found else None


def _map(tree: Any, function: Callable[[Any], Any]) -> Any:
    """`function` on every leaf of nested tuples, lists, dicts and slices."""
    kind = type(tree)
    if kind is dict:
        return {key: _map(value, function) for key, value in tree.items()}
    if kind is slice:
        return slice(_map(tree.start, function), _map(tree.stop, function), _map(tree.step, function))
    if kind in (tuple, list, torch.Size):
        items = [_map(value, function) for value in tree]
        return items if kind is list else tuple(items)
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and kind is not Proxy:
        return tuple(_map(value, function) for value in tree)
    return function(tree)


class Tracer:
    """Trace one call.  `owners` are the module trees whose modules and tensors may appear, by prefix of their names.

    `is_leaf` tells which modules stay one node.  After `trace`, `graph` is the recording and `values` maps node
    names to the fake values at the two batch sizes; `constants` are plain tensors the model used that no module owns.
    """

    def __init__(self, root: nn.Module, fake: FakeTensorMode, is_leaf: Callable[[nn.Module], bool],
                 batches: tuple[int, int]) -> None:
        self.graph = fx.Graph()
        self.values: dict[str, tuple[Any, Any]] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.batches = batches
        self.stochastic: list[str] = []
        self._fake, self._is_leaf = fake, is_leaf
        self._modules = {module: path for path, module in root.named_modules()}
        self._tensors: dict[int, str] = {}
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            self._tensors.setdefault(id(tensor), name)
        self._keep = root
        self._attributes: dict[str, Proxy] = {}
        self._path: list[str] = []
        self._evaluating = False

    # -- recording ---------------------------------------------------------------------------------------------------

    def placeholder(self, name: str, values: tuple[Any, Any]) -> Proxy:
        node = self.graph.placeholder(name)
        node.meta["source"] = "input"
        return self._proxy(node, values)

    def output(self, value: Any) -> None:
        self.graph.output(self._argument(value)).meta["source"] = "output"

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None = None) -> Any:
        """Make a node and run it on the values at both batch sizes; plain results come back as plain Python."""
        source = user_line()
        kwargs = {k: v for k, v in kwargs.items() if k != "inplace"}  # functional form: nothing writes into a graph value
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise CaptureError(f"{source}: autocast inside the model is not traced; wrap the training step in it instead")
        values = self._evaluate(op, target, args, kwargs, source)
        if _is_plain(values[0]) and values[0] == values[1] and target is not operator.setitem:
            return values[0]
        if not isinstance(values[0], torch.Tensor) and _find_tracer((args, kwargs)) is None:
            return values[0]  # torch.device("cpu") and the like: made from constants
        node_args, node_kwargs = self._argument(tuple(args)), self._argument(dict(kwargs))
        if op == "call_method" and not isinstance(target, str):
            raise AssertionError(target)
        node = self.graph.create_node(op, target, node_args, node_kwargs, name or self._name(op, target))
        node.meta["source"] = source
        node.meta["module"] = self._path[-1] if self._path else ""
        proxy = self._proxy(node, values)
        if not torch.is_grad_enabled() and _needs_grad(node, self.values) and isinstance(values[0], torch.Tensor):
            with torch.enable_grad():
                return self.record("call_method", "detach", (proxy,), {})
        return proxy

    def torch_call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A torch function or tensor method reached through `__torch_function__`."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.record("call_function", getattr, (args[0], func.__self__.__name__), {})
        if name == "__setitem__":
            return self.record("call_function", operator.setitem, args, {})
        if name in _DUNDERS and hasattr(torch.Tensor, name):
            target, reflected = _DUNDERS[name]
            return self.record("call_function", target, tuple(reversed(args)) if reflected else args, {})
        if inspect.ismethoddescriptor(func) or getattr(torch.Tensor, name, None) is func:
            return self.record("call_method", name, args, kwargs)
        return self.record("call_function", func, args, kwargs)

    def plain(self, proxy: Proxy, what: str) -> Any:
        first, second = proxy._values
        if isinstance(first, torch.Tensor):
            raise CaptureError(f"{user_line()}: {what} needs the value of the tensor {proxy._node.name}; {_DATA}")
        if first != second:
            self.refuse_batch(proxy._node, what)
        return first

    def refuse_batch(self, node: fx.Node, what: str) -> None:
        raise CaptureError(
            f"{user_line()}: {what} fixes the batch size: {node.name} ({node.meta['source']}) changes with the batch, "
            f"and ranks run other batches than the example's; write it with tensor operations over the whole batch"
        )

    # -- what Python sees while tracing ------------------------------------------------------------------------------

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Route module calls, parameters, torch functions and tensor factories of the model through this tracer."""
        call, get = nn.Module.__call__, nn.Module.__getattr__
        tracer = self

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = None if tracer._evaluating else tracer._modules.get(module)
            if path is None:
                return call(module, *args, **kwargs)
            if tracer._is_leaf(module):
                return tracer.record("call_module", path, args, kwargs, name=_identifier(path))
            tracer._path.append(path)
            try:
                return call(module, *args, **kwargs)
            finally:
                tracer._path.pop()

        def module_getattr(module: nn.Module, name: str) -> Any:
            value = get(module, name)
            if tracer._evaluating or not isinstance(value, torch.Tensor) or id(value) not in tracer._tensors:
                return value
            return tracer._attribute(tracer._tensors[id(value)], (value, value))

        def opaque(cls: Any, *args: Any, **kwargs: Any) -> Any:
            raise CaptureError(
                f"{user_line()}: the custom autograd function {cls.__name__} has a backward that a traced graph would "
                f"lose; write it with torch operations, or with .detach() (straight-through: x + (f(x) - x).detach())"
            )

        def factory(function: Any) -> Any:
            def made(*args: Any, **kwargs: Any) -> Any:
                if tracer._evaluating:
                    return function(*args, **kwargs)
                return tracer.record("call_function", function, args, kwargs)

            return made

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(nn.Module, "__call__", module_call))
            stack.enter_context(mock.patch.object(nn.Module, "__getattr__", module_getattr))
            stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(opaque)))
            for name in _FACTORIES:
                stack.enter_context(mock.patch.object(torch, name, factory(getattr(torch, name))))
            stack.enter_context(_Mode(self))
            yield

    # -- inside ------------------------------------------------------------------------------------------------------

    def _proxy(self, node: fx.Node, values: tuple[Any, Any]) -> Proxy:
        self.values[node.name] = values
        return Proxy(self, node, values)

    def _attribute(self, name: str, values: tuple[Any, Any]) -> Proxy:
        if name not in self._attributes:
            node = self.graph.create_node("get_attr", name, (), {}, _identifier(name))
            node.meta["source"], node.meta["module"] = user_line(), name.rpartition(".")[0]
            self._attributes[name] = self._proxy(node, values)
        return self._attributes[name]

    def _argument(self, tree: Any) -> Any:
        """Arguments as a graph holds them: nodes for traced values, get_attr nodes for the model's tensors."""

        def one(value: Any) -> Any:
            if type(value) is Proxy:
                return value._node
            if isinstance(value, torch.Tensor):
                return self._tensor(value)._node
            if isinstance(value, nn.Module):
                raise CaptureError(f"{user_line()}: a module is passed to a torch function; call it instead")
            return value

        return _map(tree, one)

    def _tensor(self, tensor: torch.Tensor) -> Proxy:
        name = self._tensors.get(id(tensor))
        if name is None:
            name = f"constant{len(self.constants)}"
            self.constants[name] = tensor.detach()
            self._tensors[id(tensor)] = name
        return self._attribute(name, (tensor, tensor))

    def _name(self, op: str, target: Any) -> str:
        if op == "call_function" and target is getattr:
            return "attribute"
        own = target if isinstance(target, str) else getattr(target, "__name__", "value")
        module = self._path[-1] if self._path else ""
        parent_is_plain = module and not any(True for _ in self._keep.get_submodule(module).children())
        return _identifier(module) if parent_is_plain else own.strip("_")

    def _evaluate(self, op: str, target: Any, args: Any, kwargs: Any, source: str) -> tuple[Any, Any]:
        out = []
        for k in (0, 1):
            def pick(value: Any, k: int = k) -> Any:
                return value._values[k] if type(value) is Proxy else value

            concrete, named = _map(tuple(args), pick), _map(dict(kwargs), pick)
            self._evaluating = True
            try:
                with self._fake:
                    if op == "call_module":
                        out.append(self._keep.get_submodule(target)(*concrete, **named))
                    elif op == "call_method":
                        out.append(getattr(concrete[0], target)(*concrete[1:], **named))
                    else:
                        out.append(target(*concrete, **named))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CaptureError(f"{source}: {_show(op, target)} cannot be traced: {_DATA}") from error
            except CaptureError:
                raise
            except Exception as error:
                raise self._failed(op, target, source, k, error) from error
            finally:
                self._evaluating = False
        return out[0], out[1]

    def _failed(self, op: str, target: Any, source: str, k: int, error: Exception) -> CaptureError:
        what = f"{_show(op, target)} at {source}"
        if k == 0:
            return CaptureError(f"{what} fails: {type(error).__name__}: {error}")
        first, second = self.batches
        baked = next((node.meta["source"] for node in reversed(self.graph.nodes) if _mentions(node, first)), source)
        return CaptureError(
            f"{baked}: the batch size {first} is baked into the graph: {what} runs at a batch of {first} but not of "
            f"{second} ({error}); use x.size(0) or -1 in its place"
        )


class _Mode(TorchFunctionMode):
    """Catches torch calls on tensors that are no proxies, for example on parameters reached by iteration."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracer._evaluating or getattr(func, "__name__", "") in ("__get__", "__set__", "dim", "size", "numel",
                                                                        "is_floating_point", "requires_grad_"):
            return func(*args, **(kwargs or {}))
        return self._tracer.torch_call(func, args, kwargs or {})


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.Size, torch.layout)) or (
        type(value) in (tuple, list) and all(_is_plain(v) for v in value))


def _needs_grad(node: fx.Node, values: Mapping[str, tuple[Any, Any]]) -> bool:
    return any(getattr(values[n.name][0], "requires_grad", False) for n in node.all_input_nodes)


def _mentions(node: fx.Node, number: int) -> bool:
    hits: list[bool] = []
    _map((tuple(node.args), dict(node.kwargs)), lambda v: hits.append(type(v) is int and v == number))
    return any(hits)


def _show(op: str, target: Any) -> str:
    return f"{target}" if isinstance(target, str) else getattr(target, "__name__", str(target))


def _identifier(path: str) -> str:
    """A module path as a Python name: `features.0` -> `features_0`."""
    name = "".join(c if c.isalnum() else "_" for c in path)
    return name if name and not name[0].isdigit() else f"m{name}"
