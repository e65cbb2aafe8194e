"""What generated programs need at run time: torch, and this folder, which `--standalone` copies beside them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .own_code import OwnModel, own_function, own_model, own_module
    from .role_comm import RoleComm
    from .spec import BatchGuard, Input, Neurons, RankSpec, RoleSpec, Rounds, Route, Rows, Shard
    from .transport.formats import Wire
    from .weights import Tree
    from .worker import Worker

__all__ = [
    "BatchGuard", "Input", "Neurons", "OwnModel", "RankSpec", "RoleComm", "RoleSpec", "Rounds", "Route", "Rows",
    "Shard", "Tree", "Wire", "Worker", "own_function", "own_model", "own_module",
]  # fmt: skip

_HOMES = {"RoleComm": "role_comm", "Tree": "weights", "Wire": "transport.formats", "Worker": "worker"}
_HOMES |= dict.fromkeys(("OwnModel", "own_function", "own_model", "own_module"), "own_code")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'spec')}"), name)
