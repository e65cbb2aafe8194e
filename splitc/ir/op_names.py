"""The names by which generated code calls functions: `F.relu`, `torch.cat`, `comm.dropout`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from splitc.ir import comm_ops


def _all_names() -> dict[int, str]:
    """`id` of a function -> how generated code calls it; the first name counts."""
    names: dict[int, str] = {id(getattr): "getattr"}
    for module in (F, torch, torch.linalg, torch.fft, torch.special, operator):
        prefix = "F" if module is F else module.__name__
        for name, value in vars(module).items():
            is_internal = name.startswith("_")
            if callable(value) and (not is_internal or (module is torch and isinstance(value, BuiltinFunctionType))):
                names.setdefault(id(value), f"{prefix}.{name}")
    return names


_NAMES = _all_names()  # now: while a model is traced, some functions of torch are replaced


_Op = OpOverload | OpOverloadPacket


def function_name(target: Callable[..., Any]) -> str:
    """How generated code calls a function."""
    if isinstance(target, _Op):
        return f"torch.ops.{target}"
    return f"comm.{target.__name__}" if target in comm_ops.NODES else _NAMES[id(target)]


def is_nameable(target: Callable[..., Any]) -> bool:
    """Whether generated code can call the function; torch's internal ones only if they neither draw nor write."""
    if isinstance(target, _Op) or _NAMES.get(id(target), "").startswith("torch._"):
        return _is_pure(target)
    return target in comm_ops.NODES or id(target) in _NAMES


def _is_pure(target: Any) -> bool:
    """Whether this is an operation of torch that neither draws random numbers nor writes into its inputs."""
    op = target if isinstance(target, _Op) else getattr(torch.ops.aten, target.__name__, None)
    if op is None or not str(op).startswith("aten."):
        return False
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    written = any(a.is_write and not a.is_out for each in overloads for a in each._schema.arguments)
    return not written and not any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
