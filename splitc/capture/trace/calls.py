"""One operation as the user's code calls it, before it becomes a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from splitc.capture.refusals import Unsupported, hook_text, table_problems
from splitc.capture.trace.proxy import is_proxy, leaves
from splitc.ir.op_names import is_nameable

_LITERALS = (bool, int, float, complex, str, type(None), type(...))
_SETTINGS = (torch.dtype, torch.layout, torch.memory_format)
_BY_NAME = {
    F.cross_entropy: ("input", "target"),
    F.nll_loss: ("input", "target"),
    F.batch_norm: ("input", "running_mean", "running_var"),
    F.instance_norm: ("input", "running_mean", "running_var"),
}
"""Functions whose options are read from the graph -> the arguments that stay positional."""

_STATEFUL = ("embedding", "batch_norm", "instance_norm")
"""In the names of functions that may change their arguments; the options of those in torch.nn.functional are known."""


@dataclass(frozen=True)
class Call:
    """op, target: as of an fx node.  args, kwargs: with proxies for tensors.  written: the proxy it writes into."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    written: Any = None

    @property
    def name(self) -> str:
        """`relu_` of `x.relu_()` and of `F.relu_(x)`."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))

    @property
    def inputs(self) -> list[Any]:
        """The proxies among the arguments."""
        return [value for value in leaves((self.args, self.kwargs)) if is_proxy(value)]


def require_recordable(call: Call) -> None:
    """Raise Unsupported for a call that a graph, or generated code, cannot represent."""
    if call.op != "call_module":
        _require_named(call)
    for value in leaves((call.args, call.kwargs)):
        if not is_proxy(value) and not isinstance(value, (*_LITERALS, *_SETTINGS, torch.device)):
            kind = "module" if isinstance(value, nn.Module) else type(value).__name__
            raise Unsupported(
                f"{call.name or 'the model'} is given a {kind}, which a graph cannot hold; give it tensors, numbers, "
                f"or lists, plain tuples and dicts of them"
            )
    if call.op == "call_function" and not is_nameable(call.target):
        raise Unsupported(f"{call.name} is no function of torch, so generated code cannot call it; use one that is")


def _require_named(call: Call) -> None:
    """Raise Unsupported for a function or method that is refused by its name or its options."""
    if call.name in ("register_hook", "backward"):
        raise Unsupported(hook_text(f"{call.name}()"))
    if call.target is setattr:
        raise Unsupported(f"sets .{call.args[1]} of a tensor; make a new tensor instead")
    options: Mapping[str, Any] = call.kwargs
    if call.op == "call_function" and any(word in call.name for word in _STATEFUL):
        target: Callable[..., Any] = call.target
        if getattr(F, call.name, None) is not target:
            raise Unsupported(f"{call.name} may change tensors that it is given; call torch.nn.functional or a module")
        options = inspect.signature(target).bind(*call.args, **call.kwargs).arguments
    for problem in table_problems(options):
        raise Unsupported(f"{call.name} {problem}; leave it out", stays=True)


def normalized(call: Call) -> Call:
    """The call with its options by keyword, for the functions of `_BY_NAME`."""
    if call.op != "call_function" or call.target not in _BY_NAME:
        return call
    options = inspect.signature(call.target).bind(*call.args, **call.kwargs).arguments
    if options.get("size_average") is not None or options.get("reduce") is not None:
        raise Unsupported(f"{call.name} is given size_average or reduce; write reduction='mean' or 'sum' instead")
    return replace(call, args=tuple(options.pop(name) for name in _BY_NAME[call.target]), kwargs=options)


def with_sizes(call: Call, values: tuple[Any, ...]) -> Call:
    """A `view` or `reshape` with a number in place of -1, for a dim that no batch changes: it runs without examples."""
    sizes = call.args[1] if len(call.args) == 2 and isinstance(call.args[1], (tuple, list)) else call.args[1:]
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if call.name not in ("view", "reshape") or {len(shape) for shape in shapes} != {len(sizes)}:
        return call
    known = zip(sizes, *shapes, strict=True)
    found = tuple(a if type(size) is int and size == -1 and a == b else size for size, a, b in known)
    return replace(call, args=(call.args[0], *found) if sizes is not call.args[1] else (call.args[0], found))


def each_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the arguments for each tensor of `torch._foreach_add_(xs, ys)`: those of `x.add_(y)`."""
    for k in range(len(args[0])):
        own, options = ([v[k] if isinstance(v, (list, tuple)) else v for v in g] for g in (args, kwargs.values()))
        yield tuple(own), dict(zip(kwargs, options, strict=True))


def is_plain(values: tuple[Any, ...]) -> bool:
    """Whether a value is plain Python and the same at every batch size."""
    first = values[0]
    if not all(isinstance(leaf, (*_LITERALS, *_SETTINGS)) for leaf in leaves(first)):
        return False
    return all(value == first or (value != value and first != first) for value in values)
