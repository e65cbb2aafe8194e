"""Evaluate nodes that depend neither on an input nor on a parameter: sizes of masks, flags, tables.

A branch on such a value (`if self.flag > 0`, `mask.all()`) is the same in every step, so the trace may follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from splitc.capture.trace.evaluate import computed, execute
from splitc.capture.trace.proxy import is_proxy, map_tree
from splitc.ir import comm_ops


class NotConstant(Exception):
    """The value depends on an input, on a parameter, or on a buffer that forward updates."""


class Constants:
    """Evaluates nodes on real tensors.

    values: of each node, from the trace.  real: the model's tensor by name, with its data.
    changing: names of buffers that forward updates.  used: names of tensors whose values are in the trace.
    """

    def __init__(self, values: Mapping[fx.Node, tuple[Any, ...]], real: Callable[[str], torch.Tensor]) -> None:
        self._values, self._real = values, real
        self.changing: dict[str, None] = {}
        self.used: set[str] = set()

    def value(self, node: fx.Node, probe: int | None = None) -> Any:
        """The node's value, at a batch size of the trace where it depends on that.  Raises NotConstant."""
        known = self._values.get(node, (None, None))[probe or 0]
        if isinstance(known, torch.device) or (probe is not None and isinstance(known, (int, float))):
            return known
        if node.op == "get_attr":
            tensor = self._real(str(node.target))
            if tensor.requires_grad or node.target in self.changing:
                raise NotConstant(f"{node.target} changes while the model trains")
            self.used.add(str(node.target))
            return tensor
        if node.op in ("placeholder", "call_module") or node.target in comm_ops.DRAWS:
            raise NotConstant(f"{node.name} differs from batch to batch")
        return computed(node, lambda each: self.value(each, probe))

    def result(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation on traced values.  Raises NotConstant."""

        def look(value: Any) -> Any:
            return self.value(value._node) if is_proxy(value) else value

        return execute(op, target, map_tree(args, look), map_tree(dict(kwargs), look))
