"""What a trace does where the user's code writes into a tensor: every variable that holds it stands for a new value.

A buffer, or a parameter without gradient, that is written into has the new value from the next training step on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from splitc.capture.refusals import Unsupported, writes_text
from splitc.capture.trace.calls import Call
from splitc.capture.trace.constants import Constants
from splitc.capture.trace.evaluate import Evaluator
from splitc.capture.trace.inplace import Aliasing, is_reshaped
from splitc.capture.trace.proxy import TracedTensor, is_proxy, map_tree
from splitc.ir.comm_ops import store_buffer
from splitc.ir.graph import assigned, info, set_info


class Writes:
    """record: makes a node.  source: gives the user's line.  proxies: of each node, what the user's code holds.

    owned: `id` of a proxy -> the parameter or buffer that it stands for.  changing: those that have a new value.
    """

    def __init__(
        self,
        record: Callable[..., Any],
        source: Callable[[], str],
        evaluator: Evaluator,
        proxies: dict[fx.Node, TracedTensor],
        constants: Constants,
    ) -> None:
        self.aliasing, self.owned, self.changing = Aliasing(), dict[int, str](), constants.changing
        self._bases: dict[int, tuple[TracedTensor, fx.Node]] = {}  # of views that were written into, by `id`
        self._record, self._source, self._evaluator = record, source, evaluator
        self._proxies, self._constants = proxies, constants

    def write(self, old: TracedTensor, new: TracedTensor, what: str = "this") -> TracedTensor:
        """Let every variable that holds `old` stand for `new`; where `old` is a view, write it back into its base.

        what: writes, for messages.
        """
        node, before = old._node, old._values[0]
        if (name := self.owned.get(id(old))) is not None:
            self._require_state(name, before, new._values[0], what)
        if new._values[0].dtype != before.dtype:
            new = self._record("call_method", "to", (new, before.dtype), {})
        if (found := self._bases.get(id(old)) or self._base(old)) is not None:
            self._bases[id(old)] = base, view = found
            if view.target is operator.getitem:
                key = map_tree(view.args[1], lambda value: self._proxies.get(value, value))
                self._record("call_function", operator.setitem, (base, key, new), {})
            else:
                alike = before.shape == base._values[0].shape
                whole = new if alike else self._record("call_method", "reshape_as", (new, base), {})
                self.write(base, whole, what)
        owner = self.aliasing.owner(self.storage(before))
        if owner is not None and name is None and found is None:
            raise Unsupported(writes_text(what, str(owner.target)), stays=True)
        self.aliasing.write(node, self.storage(before), self._source())
        old.__dict__.update(_node=new._node, _values=new._values)
        self._proxies[new._node] = old
        return old

    def _base(self, view: TracedTensor) -> tuple[TracedTensor, fx.Node] | None:
        """The tensor of which this one is a part, or another shape, and the node that says which; None: of none."""
        node, value = view._node, view._values[0]
        base = self._proxies.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if base is None or base is view or base._node not in node.all_input_nodes:
            return None
        if self.storage(value) != self.storage(base._values[0]):
            return None
        reshaped = self._evaluator.unrecorded(lambda: is_reshaped(value, base))
        return (base, node) if node.target is operator.getitem or reshaped else None

    def assign(self, held: Any, value: Any) -> None:
        """Let a buffer be another tensor: `self.steps = self.steps + 1`; what held it before keeps its value."""
        name = self.owned[id(held)]
        self._require_own(name, held, value)
        self._require_state(name, held._values[0], value._values[0], "this")
        node = next(node for node, proxy in self._proxies.items() if proxy is held and node.target == name)
        self._proxies[node] = value
        self.owned[id(value)] = self.owned.pop(id(held))

    def data_set(self, call: Call) -> Call:
        """`p.data = value` as the copy that it is to a tensor of the model."""
        tensor, name, value = call.args
        if name != "data" or id(tensor) not in self.owned:
            return call
        self._require_own(self.owned[id(tensor)], tensor, value)
        return Call("call_method", "copy_", (tensor, value), {})

    def _require_own(self, name: str, tensor: TracedTensor, value: Any) -> None:
        """Raise Unsupported unless a value can take the place of a tensor, and lies in no other one's memory."""
        if type(value) is not TracedTensor or any(
            (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(tensor._values, value._values, strict=True)
        ):
            raise Unsupported(f"{name} is given another shape, dtype or kind of value while the model runs", stays=True)
        if (owner := self.aliasing.owner(self.storage(value._values[0]))) is not None:
            raise Unsupported(f"{name} is made the same memory as {owner.target}; give it a .clone()", stays=True)

    def _require_state(self, name: str, before: torch.Tensor, new: torch.Tensor, what: str) -> None:
        """Note a write into a tensor of the model.  Raises Unsupported for one that trains, or keeps a graph."""
        if before.requires_grad:
            raise Unsupported(writes_text(what, name), stays=True)
        if new.requires_grad:
            raise Unsupported(f"{what} keeps in {name} how it was computed: write .detach() there", stays=True)
        if name in self._constants.used:
            raise Unsupported(f"{what} changes {name}, whose value forward has used as a plain number or a branch")
        self.changing[name] = None

    def store(self, buffer: fx.Node) -> None:
        """Record that the buffer has another value from the next step on."""
        value = self._proxies[buffer]._node
        with buffer.graph.inserting_after(value):
            node = buffer.graph.call_function(store_buffer, (buffer, value))
        set_info(node, info(value), side_effect=True)

    def storage(self, tensor: torch.Tensor) -> int:
        """The identity of a tensor's storage, which all its views share."""
        return self._evaluator.unrecorded(lambda: int(tensor.untyped_storage()._cdata))


def is_assigned(call: Call) -> bool:
    """Whether x holds the value already: `x[k] *= 2` writes into the view, and then the view into x."""
    node = call.args[0]._node
    parts = map_tree(call.args[1:], lambda value: value._node if is_proxy(value) else value)
    return bool(node.target is assigned and node.args[1:] == parts)
