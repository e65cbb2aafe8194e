"""Run operations on fake tensors at two batch sizes, and on numbers at four."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from splitc.capture.refusals import Failed, Unsupported, writes_text
from splitc.capture.source_lines import first_line
from splitc.capture.trace.calls import Call
from splitc.capture.trace.proxy import TracedTensor, is_proxy, leaves, map_tree
from splitc.ir.graph import NORMS, info

T = TypeVar("T")

DYNAMIC = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by fake tensors where a result, or its shape, depends on the data."""


class Evaluator:
    """Evaluates calls at the batch sizes `batches`, and calls on numbers at all `probes`.

    Two sizes show which dimension of a tensor is the batch.  Numbers need more: 4 // 2 equals 5 // 2.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, fake: FakeTensorMode, batches: tuple[int, int]) -> None:
        self.batches = batches
        self.probes = (*batches, 2 * batches[1] + 1, 5 * batches[1] + 2)
        self.busy = False  # while true, torch functions are not recorded
        self._root, self._graph, self._fake = root, graph, fake

    def values(self, call: Call) -> tuple[Any, ...]:
        """One value for each batch size.  Raises one of DYNAMIC, or Unsupported for a call that fails or writes."""
        inputs = [value for value in leaves((call.args, call.kwargs)) if is_proxy(value)]
        only_numbers = bool(inputs) and all(isinstance(value, (int, float)) for value in inputs)
        versions = self._versions(inputs)
        found = tuple(self._value(call, k) for k in range(len(self.probes) if only_numbers else 2))
        if call.target not in NORMS and self._versions(inputs) != versions:
            raise Unsupported(writes_text(call.name, "a tensor that it is given"))
        return found

    def _versions(self, inputs: list[Any]) -> list[int]:
        """How often each tensor was written into."""
        return self.unrecorded(lambda: [value._values[0]._version for value in inputs if type(value) is TracedTensor])

    def size_at_probes(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """A size of a tensor at all probes, extrapolated linearly from the first two."""
        a, b = values
        return tuple(a + (b - a) * (probe - self.batches[0]) for probe in self.probes)

    def unrecorded(self, work: Callable[[], T]) -> T:
        """Run `work()` without recording it."""
        before, self.busy = self.busy, True
        try:
            return work()
        finally:
            self.busy = before

    def _value(self, call: Call, k: int) -> Any:
        def pick(value: Any) -> Any:
            return value._values[k] if is_proxy(value) else value

        target = self._root.get_submodule(call.target) if call.op == "call_module" else call.target
        args, kwargs = map_tree(call.args, pick), map_tree(dict(call.kwargs), pick)
        try:
            with self._fake:
                return self.unrecorded(lambda: execute(call.op, target, args, kwargs))
        except DYNAMIC:
            raise
        except Exception as error:
            raise self._failed(call, k, error) from error

    def _failed(self, call: Call, k: int, error: Exception) -> Unsupported:
        said = first_line(error)
        if k == 0:
            return Failed(f"{call.name} fails: {type(error).__name__}: {said}")
        first, second = self.batches
        text = f"{call.name} runs at a batch of {first} but not of {second} ({said})"
        if _mentions((call.args, call.kwargs), first):
            return Unsupported(
                f"the batch size {first} is baked into the graph: {text}; write x.size(0) or -1 in its place"
            )
        baked = next((n for n in reversed(self._graph.nodes) if _mentions((n.args, n.kwargs), first)), None)
        if baked is None:
            return Unsupported(f"{text}; ranks run other batches than the example's, so it must work for any")
        return Unsupported(
            f"the batch size {first} is baked into {baked.name}: {text}; write x.size(0) or -1 in its place",
            info(baked).source,
        )


def execute(op: str, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call a module, a function or a method."""
    return getattr(args[0], target)(*args[1:], **kwargs) if op == "call_method" else target(*args, **kwargs)


def computed(node: fx.Node, of: Callable[[fx.Node], Any]) -> Any:
    """The value of a node, from those that `of` gives of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), of)
    return execute(node.op, node.target, args, kwargs)


def _mentions(tree: Any, number: int) -> bool:
    return any(type(value) is int and value == number for value in leaves(tree))
