"""What a trace does where the user's code writes into a tensor: every variable that holds it stands for a new value.

A buffer may be written into where that counts steps; it has the new value from the next training step on.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import fx, nn

from splitc.capture.calls import Call
from splitc.capture.constants import Constants
from splitc.capture.evaluate import Evaluator
from splitc.capture.inplace import Aliasing, is_reshaped
from splitc.capture.proxy import TracedTensor, is_proxy, map_tree
from splitc.capture.refusals import Unsupported, writes_text
from splitc.ir.comm_ops import store_buffer
from splitc.ir.graph import assigned, info, set_info


class Trace(Protocol):
    """What writes need of a tracer."""

    graph: fx.Graph
    evaluator: Evaluator

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...

    def source(self) -> str: ...


class Writes:
    """proxies: of each node, the tensor that the user's code holds.

    owned: `id` of a proxy -> the parameter or buffer that it stands for.
    """

    def __init__(self, trace: Trace, proxies: dict[fx.Node, TracedTensor], constants: Constants) -> None:
        self.aliasing, self.owned = Aliasing(), dict[int, str]()
        self._trace, self._proxies, self._constants = trace, proxies, constants

    def write(self, old: TracedTensor, new: TracedTensor) -> TracedTensor:
        """Let every variable that holds `old` stand for `new`; where `old` is a view, write it back into its base."""
        node, before = old._node, old._values[0]
        if new._values[0].dtype != before.dtype:
            new = self._trace.record("call_method", "to", (new, before.dtype), {})
        base = self._proxies.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if base is None or base is old or self.storage(before) != self.storage(base._values[0]):
            pass
        elif node.target is not operator.getitem and self._trace.evaluator.unrecorded(
            lambda: is_reshaped(before, base)
        ):
            self.write(base, self._trace.record("call_method", "reshape_as", (new, base), {}))
        elif node.target is operator.getitem:
            key = map_tree(node.args[1], lambda value: self._proxies.get(value, value))
            self._trace.record("call_function", operator.setitem, (base, key, new), {})
        owner = self.aliasing.owner(self.storage(before))
        if owner is not None and id(old) not in self.owned:
            raise Unsupported(writes_text("this", str(owner.target)), stays=True)
        self.aliasing.write(node, self.storage(before), self._trace.source())
        old.__dict__.update(_node=new._node, _values=new._values)
        self._proxies[new._node] = old
        return old

    def require_counter(self, call: Call, tensor: TracedTensor, from_batch: bool) -> None:
        """Raise Unsupported for a write into a parameter, and into a buffer other than one that counts steps."""
        name = self.owned[id(tensor)]
        if isinstance(tensor, nn.Parameter) or from_batch:
            raise Unsupported(writes_text(call.name, name), stays=True)
        if name in self._constants.used:
            raise Unsupported(f"{call.name} changes {name}, whose value forward has used as a plain number or a branch")
        self._constants.changing[name] = None

    def store(self, buffer: fx.Node) -> None:
        """Record that the buffer has another value from the next step on."""
        value = self._proxies[buffer]._node
        with self._trace.graph.inserting_after(value):
            node = self._trace.graph.call_function(store_buffer, (buffer, value))
        set_info(node, info(value), side_effect=True)

    def storage(self, tensor: torch.Tensor) -> int:
        """The identity of a tensor's storage, which all its views share."""
        return self._trace.evaluator.unrecorded(lambda: int(tensor.untyped_storage()._cdata))


def is_assigned(call: Call) -> bool:
    """Whether x holds the value already: `x[k] *= 2` writes into the view, and then the view into x."""
    node = call.args[0]._node
    parts = map_tree(call.args[1:], lambda value: value._node if is_proxy(value) else value)
    return bool(node.target is assigned and node.args[1:] == parts)
