"""The names by which generated code calls functions: `F.relu`, `torch.cat`, `comm.dropout`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from splitc.ir import comm_ops


def _all_names() -> dict[int, str]:
    """`id` of a function -> how generated code calls it; the first name counts."""
    names: dict[int, str] = {
        id(getattr): "getattr",
        id(torch._weight_norm): "torch._weight_norm",
    }
    for module, prefix in (
        (F, "F"),
        (torch, "torch"),
        (torch.linalg, "torch.linalg"),
        (torch.fft, "torch.fft"),
        (torch.special, "torch.special"),
        (operator, "operator"),
    ):
        for name, value in vars(module).items():
            if callable(value) and not name.startswith("_"):
                names.setdefault(id(value), f"{prefix}.{name}")
    return names


_NAMES = _all_names()  # now: while a model is traced, some functions of torch are replaced


def function_name(target: Callable[..., Any]) -> str:
    """How generated code calls a function."""
    return f"comm.{target.__name__}" if target in comm_ops.NODES else _NAMES[id(target)]


def is_nameable(target: Callable[..., Any]) -> bool:
    """Whether generated code can call the function."""
    return target in comm_ops.NODES or id(target) in _NAMES
