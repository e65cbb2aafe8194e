"""What generated programs need at run time: torch, and this folder, which `--standalone` copies beside them."""

from .rank import Rank
from .weights import Tree
from .worker import Worker

__all__ = ["Rank", "Tree", "Worker"]
