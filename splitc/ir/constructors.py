"""Write a module of torch.nn as its constructor call: `nn.Linear(9216, 4096)`.

A module stays one line of a generated program when its attributes give a constructor call that rebuilds it; any other
module is traced through to the functions and parameters that it uses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from splitc.ir.names import quoted

_SKIP = ("device", "dtype", "self")
_ATTENTION: dict[str, Callable[[Any], Any]] = {  # arguments that nn.MultiheadAttention stores under other names
    "bias": lambda m: m.in_proj_bias is not None,
    "add_bias_kv": lambda m: m.bias_k is not None,
    "kdim": lambda m: None if m.kdim == m.embed_dim else m.kdim,
    "vdim": lambda m: None if m.vdim == m.embed_dim else m.vdim,
}


def construction(module: nn.Module) -> str | None:
    """Return the constructor call of a torch.nn module with parameters, or None when it must be traced through.

    A module whose training differs from that of a constructed one is traced through too: a normalisation in evaluation
    mode, an attention with dropout.
    """
    cls = type(module)
    if not cls.__module__.startswith("torch.nn.modules") or getattr(nn, cls.__name__, None) is not cls:
        return None
    is_attention = isinstance(module, nn.MultiheadAttention)
    if (any(True for _ in module.children()) and not is_attention) or not (module._parameters or module._buffers):
        return None
    evaluates = hasattr(module, "track_running_stats") and not module.training
    if _has_hooks(module) or getattr(module, "dropout", None) or evaluates:
        return None
    return _call(module, _ATTENTION if is_attention else {})


def _call(module: nn.Module, special: dict[str, Callable[[Any], Any]]) -> str | None:
    """Write the call with the arguments that differ from their defaults, the leading required ones by position."""
    parts: list[str] = []
    positional = True
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters(type(module)).items():
        if name in _SKIP or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name.startswith("_"):
            continue
        if name not in special and not hasattr(module, name):
            return None
        value = special[name](module) if name in special else getattr(module, name)
        if isinstance(value, torch.Tensor) or (name == "bias" and value is None):
            value = value is not None
        value = _short(value)
        if parameter.default is not parameter.empty and _same(value, parameter.default):
            positional = False
            continue
        if not _is_literal(value):
            return None
        arguments[name] = value
        positional = positional and parameter.default is parameter.empty
        parts.append(literal(value) if positional else f"{name}={literal(value)}")
    return f"nn.{type(module).__name__}({', '.join(parts)})" if _rebuilds(module, arguments) else None


def _parameters(cls: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    """The constructor's parameters; those of recurrent modules are in a base class, which also takes their `mode`."""
    if not issubclass(cls, nn.RNNBase):
        return inspect.signature(cls).parameters
    stated = {name: p for name, p in inspect.signature(nn.RNNBase).parameters.items() if name != "mode"}
    if issubclass(cls, nn.RNN):
        stated["nonlinearity"] = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")
    return stated


def _rebuilds(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Whether the call constructs a module with the same settings, parameters and buffers."""
    with torch.device("meta"):
        try:
            other = type(module)(**arguments)
        except (TypeError, ValueError):
            return False

    def tensors(m: nn.Module) -> dict[str, torch.Size]:
        return {n: t.shape for n, t in (*m.named_parameters(), *m.named_buffers())}

    def settings(m: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(m).items() if _is_literal(value) and name != "training"}

    return settings(other) == settings(module) and tensors(other) == tensors(module)


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _short(value: Any) -> Any:
    """Shorten `(3, 3)` and `(3,)` to `3`."""
    is_square = isinstance(value, tuple) and len(value) in (1, 2) and type(value[0]) is int and value[0] == value[-1]
    return value[0] if is_square else value


def _same(value: Any, default: Any) -> bool:
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _is_literal(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_literal, value))
    return value is None or isinstance(value, (bool, int, float, str))


def literal(value: Any) -> str:
    """A constant as Python source."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, (torch.dtype, torch.layout)) else repr(value)
