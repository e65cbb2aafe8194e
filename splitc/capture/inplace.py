"""Functional forms of operations that write into a tensor.

A graph value is computed once and never changes, so that it may be sent to another role, or kept for backward.  An
operation that writes is recorded in the form that returns a new tensor, which the variable then stands for:

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

from splitc.capture.calls import Call
from splitc.capture.proxy import BINARY, IN_PLACE, is_proxy
from splitc.capture.refusals import Unsupported
from splitc.ir.graph import assigned

_FILLING = ("zero_", "fill_", "copy_")
_COUNTING = {operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_"}


def functional(call: Call) -> Call:
    """The call in the form that returns a new tensor; `written` names the one it would have changed.

    Raises Unsupported for one that has no such form.
    """
    first = call.args[0] if call.args else call.kwargs.get("input")
    if call.target is operator.setitem:
        return replace(call, target=assigned, written=first)
    if call.target in IN_PLACE:
        return replace(call, target=IN_PLACE[call.target], written=first if isinstance(first, torch.Tensor) else None)
    if call.kwargs.get("out") is not None:
        return replace(call, kwargs=_without(call.kwargs, "out"), written=call.kwargs["out"])
    if call.op == "call_method" and call.target in _FILLING:
        value = call.args[1] if len(call.args) > 1 else 0
        return Call("call_function", assigned, (first, ..., value), {}, first)
    if call.name.endswith("_") and not call.name.endswith("__") and call.target not in BINARY.values():
        return replace(call, target=_returning(call), written=first)
    return _without_inplace(call, first)


def counting(call: Call) -> Call | None:
    """The call as a method that changes a buffer in place, such as `add_`; None for other calls."""
    if call.target in _COUNTING:
        return replace(call, op="call_method", target=_COUNTING[call.target])
    is_method = call.op == "call_method" and call.name.endswith("_")
    return call if is_method else None


def _returning(call: Call) -> Any:
    plain = call.name[:-1]
    places = (torch.Tensor,) if call.op == "call_method" else (F, torch)
    found = next((getattr(place, plain) for place in places if hasattr(place, plain)), None)
    if found is None:
        raise Unsupported(
            f"{call.name} changes a tensor in place and has no form that returns a new one; use an operation that does"
        )
    return plain if call.op == "call_method" else found


def _without_inplace(call: Call, first: Any) -> Call:
    """The call without its argument `inplace`, wherever it stands."""
    position = _inplace_position(call.target) if call.op == "call_function" else None
    if position is None or not is_proxy(first):
        return call
    inplace = call.args[position] if len(call.args) > position else call.kwargs.get("inplace", False)
    return replace(
        call, args=call.args[:position], kwargs=_without(call.kwargs, "inplace"), written=first if inplace else None
    )


@cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    """Where a function takes `inplace`, which is always its last argument."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C; none of those takes `inplace`
        return None
    return names.index("inplace") if "inplace" in names else None


def _without(kwargs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != name}


class Sharing:
    """Which nodes share memory, and which of them must not be read any more because another one was written into."""

    def __init__(self) -> None:
        self._nodes: dict[int, list[fx.Node]] = defaultdict(list)
        self._stale: dict[fx.Node, str] = {}

    def add(self, node: fx.Node, memory: int) -> None:
        """What `node` makes lies in `memory`, which stays alive."""
        self._nodes[memory].append(node)

    def owner(self, memory: int) -> fx.Node | None:
        """The parameter, buffer or constant that lies in `memory`."""
        return next((node for node in self._nodes[memory] if node.op == "get_attr"), None)

    def write(self, node: fx.Node, memory: int, line: str) -> None:
        """`line` writes into `node`, whose value lies in `memory`: what else lies there is stale from here on."""
        for other in self._nodes[memory]:
            self._stale.setdefault(other, f"{node.name}, into which {line} writes")

    def require_fresh(self, node: fx.Node) -> None:
        """Raise Unsupported for a node whose memory was written into under another name."""
        if node in self._stale:
            raise Unsupported(
                f"{node.name} ({node.meta['source']}) shares memory with {self._stale[node]}; values of a graph never "
                f"change: make a new tensor there (y = y * 2 instead of y *= 2)"
            )
