"""Answer what a model's Python asks about traced values: their sizes, and values that do not depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from splitc.capture.refusals import DATA, DATA_ACCESSES, Unsupported
from splitc.capture.trace.calls import Call
from splitc.capture.trace.constants import Constants, NotConstant
from splitc.capture.trace.evaluate import Evaluator
from splitc.capture.trace.proxy import Sizes, TracedTensor, is_proxy
from splitc.ir.graph import info


@dataclass
class Queries:
    """constants: evaluates nodes that depend on no input.  size_node: makes the node of one size, from its values.

    notes: receives a sentence for each assertion that is left out.
    """

    evaluator: Evaluator
    constants: Constants
    size_node: Callable[[Call, tuple[int, ...]], Any]
    notes: list[str]
    _sizes: dict[tuple[fx.Node, int], Any] = field(default_factory=dict)

    def answer(self, call: Call) -> Any:
        """The answer to a query about a tensor; NotImplemented for an operation."""
        tensor = call.args[0] if call.args else None
        if type(tensor) is not TracedTensor:
            return NotImplemented
        if call.target in (torch._assert, torch._assert_async):
            return self._left_out(tensor)
        if call.target is getattr and call.args[1] == "shape":
            return self.sizes(tensor)
        if call.target is setattr and call.args[1] == "requires_grad":
            return None
        if call.op != "call_method":
            return NotImplemented
        if call.target == "size":
            dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
            return self.sizes(tensor) if dim is None else self.sizes(tensor)[dim]
        if call.target in ("numel", "nelement"):
            return math.prod(self.sizes(tensor))
        if call.target in ("requires_grad_", "retain_grad"):
            return tensor
        if call.target in DATA_ACCESSES:
            return getattr(self.plain(tensor, DATA_ACCESSES[call.target]), call.target)()
        return NotImplemented

    def sizes(self, proxy: TracedTensor) -> Any:
        """The shape: a torch.Size, or Sizes with a proxy for every entry that depends on the batch."""
        entries = tuple(self._size(proxy, dim) for dim in range(len(proxy._values[0].shape)))
        return Sizes(entries) if any(map(is_proxy, entries)) else torch.Size(entries)

    def peek(self, value: Any, name: str) -> Any:
        """An attribute of a traced value.  Raises AttributeError as the value does."""
        return self.evaluator.unrecorded(lambda: getattr(value, name))

    def plain(self, proxy: Any, what: str) -> Any:
        """The value, when it is the same for every batch: a number, or a real tensor that depends on no input.

        what: the Python construct that needs it, for messages.  Raises Unsupported.
        """
        if not is_proxy(proxy):
            return proxy
        node, values = proxy._node, proxy._values
        if type(proxy) is TracedTensor:
            try:
                return self.evaluator.unrecorded(lambda: self.constants.value(node))
            except NotConstant:
                raise Unsupported(f"{what} needs the value of {node.name} ({info(node).source}); {DATA}") from None
        if all(value == values[0] for value in values):
            return values[0]
        shown = f"{node.args[0]}.size({node.args[1]})" if node.target == "size" else node.name
        raise Unsupported(
            f"{what} fixes the batch size: {shown} changes with the batch, and ranks run other batches than the "
            f"example's; leave {what} out, and write operations over the whole batch"
        )

    def assumed(self, proxy: TracedTensor, truth: bool) -> bool:
        """The truth of a value that an assert asks for: `truth` where it depends on the data."""
        try:
            return bool(self.plain(proxy, "an assert"))
        except Unsupported:
            self._left_out(proxy)
            return truth

    def _left_out(self, proxy: TracedTensor) -> None:
        self.notes.append(f"The assertion on {proxy._node.name} ({info(proxy._node).source}) is left out.")

    def _size(self, proxy: TracedTensor, dim: int) -> Any:
        key = proxy._node, dim
        if key not in self._sizes:
            sizes = tuple(value.shape[dim] for value in proxy._values)
            self._sizes[key] = self.size_node(Call("call_method", "size", (proxy, dim), {}), sizes)
        return self._sizes[key]
