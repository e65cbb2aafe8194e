"""Replace operations that write into a tensor by functional ones.

A graph value is computed once and never changes, so that it may be sent to another role or saved for backward.  An
in-place operation is recorded as the one that returns a new tensor, which the variable then stands for:

    x.mul_(2)              ->   x' = x.mul(2)
    F.relu(x, inplace=True)  ->   x' = F.relu(x)
    x[:, 0] = y            ->   x' = assigned(x, (slice(None), 0), y)
"""

from __future__ import annotations

import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from splitc.capture.refusals import Unsupported
from splitc.capture.trace.calls import Call
from splitc.capture.trace.proxy import BINARY, IN_PLACE, is_proxy
from splitc.ir.graph import assigned, info

_FILLS = ("zero_", "fill_", "copy_")


def functional(call: Call) -> Call:
    """The call that returns a new tensor instead; `written` is the tensor that it would have changed.

    Raises Unsupported where there is none.
    """
    if call.op == "call_module":
        return call
    first = call.args[0] if call.args else call.kwargs.get("input")
    if call.target is operator.setitem:
        return replace(call, target=assigned, written=first)
    if call.target in IN_PLACE:
        return replace(call, target=IN_PLACE[call.target], written=first if isinstance(first, torch.Tensor) else None)
    if call.kwargs.get("out") is not None:
        return replace(call, kwargs=_without(call.kwargs, "out"), written=call.kwargs["out"])
    if call.op == "call_method" and call.target in _FILLS:
        value = call.args[1] if len(call.args) > 1 else 0
        return Call("call_function", assigned, (first, ..., value), {}, first)
    if call.name.endswith("_") and not call.name.endswith("__") and call.target not in BINARY.values():
        return replace(call, target=_out_of_place(call), written=first)
    return _without_inplace(call, first)


def _out_of_place(call: Call) -> Any:
    plain = call.name[:-1]
    places = (torch.Tensor,) if call.op == "call_method" else (F, torch)
    found = next((getattr(place, plain) for place in places if hasattr(place, plain)), None)
    if found is None:
        raise Unsupported(
            f"{call.name} changes a tensor in place and has no form that returns a new one; use an operation that does"
        )
    return plain if call.op == "call_method" else found


def _without_inplace(call: Call, first: Any) -> Call:
    """The call without its argument `inplace`."""
    position = _inplace_position(call.target) if call.op == "call_function" else None
    if position is None or not is_proxy(first):
        return call
    inplace = call.args[position] if len(call.args) > position else call.kwargs.get("inplace", False)
    return replace(
        call, args=call.args[:position], kwargs=_without(call.kwargs, "inplace"), written=first if inplace else None
    )


@cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    """The position of the argument `inplace`, which is always the last one; None where there is none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in function; none of those takes `inplace`
        return None
    return names.index("inplace") if "inplace" in names else None


def _without(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


def is_reshaped(view: torch.Tensor, base: Any) -> bool:
    """Whether a view has all elements of its traced base, in the same order."""
    whole = base._values[0]
    in_order = view.is_contiguous() and whole.is_contiguous() and view.storage_offset() == whole.storage_offset()
    return in_order and view.numel() == whole.numel()


class Aliasing:
    """Which nodes share a storage, and which of them are stale because another one was written into."""

    def __init__(self) -> None:
        self._nodes: dict[int, list[fx.Node]] = defaultdict(list)
        self._stale: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, storage: int) -> None:
        """The value of `node` lies in `storage`, which stays alive."""
        self._nodes[storage].append(node)

    def owner(self, storage: int) -> fx.Node | None:
        """The parameter, buffer or constant that lies in `storage`."""
        return next((node for node in self._nodes[storage] if node.op == "get_attr"), None)

    def write(self, node: fx.Node, storage: int, line: str) -> None:
        """Mark every value in `storage` stale: `line` writes into `node`, which lies there."""
        for other in self._nodes[storage]:
            self._stale.setdefault(other, f"{node.name}, into which {line} writes")

    def require_fresh(self, node: fx.Node) -> None:
        """Raise Unsupported for a node whose storage was written into through another tensor."""
        if node in self._stale:
            raise Unsupported(
                f"{node.name} ({info(node).source}) shares memory with {self._stale[node]}; values of a graph never "
                f"change: make a new tensor there (y = y * 2 instead of y *= 2)"
            )
