"""What generated programs need at run time: torch, and this folder, which `--standalone` copies beside them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .rank import Rank
    from .role_comm import RoleComm
    from .weights import Tree
    from .worker import Worker

__all__ = ["Rank", "RoleComm", "Tree", "Worker"]

_HOMES = {"Rank": "rank", "RoleComm": "role_comm", "Tree": "weights", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
