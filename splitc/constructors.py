"""How a module of torch.nn is written in Python: `nn.Linear(9216, 4096)`.

A module stays one line of a generated program when its constructor call can be read off the module and rebuilds it;
any other module is traced through to the functions and parameters it uses.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn

_SKIP = ("device", "dtype", "self")


def construction(module: nn.Module) -> str | None:
    """The constructor call of a parameterised torch.nn module, or None when it must be traced through."""
    cls = type(module)
    if not cls.__module__.startswith("torch.nn.modules") or getattr(nn, cls.__name__, None) is not cls:
        return None
    if any(True for _ in module.children()) or not (module._parameters or module._buffers) or _has_hooks(module):
        return None
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return None if isinstance(module, nn.MultiheadAttention) or getattr(module, "dropout", 0.0) else _call(module)
    return _call(module)


def _call(module: nn.Module) -> str | None:
    cls = type(module)
    parts: list[str] = []
    positional = True
    arguments: dict[str, Any] = {}
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return None
    for name, parameter in signature.parameters.items():
        if name in _SKIP or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name.startswith("_"):
            continue
        if not hasattr(module, name):
            return None
        value = getattr(module, name)
        if isinstance(value, torch.Tensor) or (name == "bias" and value is None):
            value = value is not None
        value = _plain(value)
        if parameter.default is not parameter.empty and _same(value, parameter.default):
            positional = False
            continue
        if not _is_literal(value):
            return None
        arguments[name] = value
        positional = positional and parameter.default is parameter.empty
        parts.append(literal(value) if positional else f"{name}={literal(value)}")
    return f"nn.{cls.__name__}({', '.join(parts)})" if _rebuilds(module, arguments) else None


def _rebuilds(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the call gives a module of the same settings, parameters and buffers."""
    with torch.device("meta"):
        try:
            other = type(module)(**arguments)
        except (TypeError, ValueError):
            return False

    def tensors(m: nn.Module) -> dict[str, torch.Size]:
        return {n: t.shape for n, t in (*m.named_parameters(), *m.named_buffers())}

    return other.extra_repr() == module.extra_repr() and tensors(other) == tensors(module)


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) > 0 and all(v == value[0] for v in value) and type(value[0]) is int:
        return value[0] if len(value) == 2 or len(value) == 1 else value
    return value


def _same(value: Any, default: Any) -> bool:
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_literal(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def literal(value: Any) -> str:
    """A constant as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if type(value) is tuple:
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, (torch.dtype, torch.layout)) else repr(value)
