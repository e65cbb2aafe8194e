"""Find numbers that are no linear function of the batch size: ranks and one process run other batches.

A mean divides by the batch size, and what a rank divides by is a share of it; `x.size(0) // 4` is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from splitc.ir.graph import info
from splitc.ir.program import SizeSpec

_TRIED = (1, 2, 3, 5, 8, 12, 100, 1001, 65536)


def numbers_of_batch(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[Any]]:
    """Numbers that are computed from the batch size alone -> their values at some batches."""
    found: dict[fx.Node, list[Any]] = {}
    for node in nodes:
        spec, read = info(node).spec, node.all_input_nodes
        if isinstance(spec, SizeSpec):
            found[node] = [spec.scale * batch + spec.offset for batch in _TRIED]
        elif spec is None and read and found.keys() >= set(read) and _is_pythons(node.target):
            found[node] = [_at(node, found, k) for k in range(len(_TRIED))]
    return found


def _is_pythons(function: object) -> bool:
    """Whether it computes numbers from numbers; functions of torch make tensors of that size."""
    return getattr(function, "__module__", None) in ("_operator", "builtins", "math")


def _at(node: fx.Node, found: dict[fx.Node, list[Any]], k: int) -> Any:
    args: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: found[n][k])
    assert callable(node.target)
    return node.target(*args[0], **args[1])


def is_linear(values: Sequence[Any]) -> bool:
    """Whether values at the tried batches are those of a linear function."""
    slopes = [(value - values[0]) / (batch - _TRIED[0]) for batch, value in zip(_TRIED[1:], values[1:], strict=True)]
    return bool(max(slopes) - min(slopes) <= 1e-9 * max(map(abs, slopes)))
