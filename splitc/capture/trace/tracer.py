"""Record what a model's Python does as a torch.fx graph, on fake tensors of two batch sizes at once.

Every operation runs on both.  A number that is the same at all batch sizes is a constant; one that differs stays in
the graph, and Python that needs its value (`range(x.size(0))`) is refused at that line, so that the example's batch
size is not baked into the program.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.capture.example.example import LOSS
from splitc.capture.refusals import DATA, Failed, Failure, Unsupported, no_python_randomness, unusual
from splitc.capture.source_lines import line_of, user_line
from splitc.capture.trace.attributes import Attributes, identifier
from splitc.capture.trace.bags import with_rows
from splitc.capture.trace.batch_guards import BatchGuards
from splitc.capture.trace.calls import Call, each_of, is_plain, normalized, require_recordable, with_sizes
from splitc.capture.trace.chunks import chunk_of, chunks_in
from splitc.capture.trace.constants import Constants, NotConstant
from splitc.capture.trace.evaluate import DYNAMIC, Evaluator
from splitc.capture.trace.inplace import functional
from splitc.capture.trace.proxy import Traced, TracedNumber, TracedTensor, is_proxy, leaves, map_tree, operation
from splitc.capture.trace.queries import Queries
from splitc.capture.trace.random_calls import RandomCalls
from splitc.capture.trace.writes import Writes, is_assigned
from splitc.errors import CaptureError
from splitc.ir.graph import assigned, info, set_info, update_info
from splitc.ir.regions import Region, Unread
from splitc.runtime.nested import parts, with_parts


class Tracer:
    """Traces one call of a model and its loss.

    After the trace, `graph` is the recording, and `values` maps each node to its values at the batch sizes of
    `evaluator`.  origin: what messages name where torch's own code was called: the model's class, or the loss.
    notes: sentences for the report.
    refusal: the first one, which counts even if the model's own `except` hides it.
    joins: whether loops over chunks of the batch take one turn, see `chunks`.
    failure: where the trace failed first, if a region may hold it.
    """

    def __init__(self, root: nn.Module, original: nn.Module, fake: FakeTensorMode, batches: tuple[int, int]) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, tuple[Any, ...]] = {}
        self.evaluator = Evaluator(root, self.graph, fake, batches)
        self.attributes = Attributes(root, original)
        self.origin = type(original).__name__
        self.notes: list[str] = []
        self.guards = BatchGuards(self.values, batches)
        self.reads_mode = False  # whether Python asked if the model trains
        self.refusal: CaptureError | None = None
        self.failure: Failure | None = None
        self.joins = False
        self._running: list[tuple[str, nn.Module]] = [("", root)]  # path and module of each forward that is running
        self.root, self.original, self.fake = root, original, fake
        self._constants = Constants(self.values, self.attributes.real)
        self.queries = Queries(self.evaluator, self._constants, self._result, self.notes)
        self._proxies: dict[fx.Node, TracedTensor] = {}
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._batched: set[fx.Node] = set()
        self.writes = Writes(self.record, self.source, self.evaluator, self._proxies, self._constants)
        self.random = RandomCalls(self.record, self.writes.write)

    def placeholder(self, name: str, values: tuple[Any, Any]) -> Any:
        node = self.graph.placeholder(name)
        update_info(node, source="input", module="")
        self._batched.add(node)
        return self._proxy(node, values)

    @contextmanager
    def running(self, path: str, module: nn.Module) -> Iterator[None]:
        """While this holds, what is recorded belongs to the forward of this module."""
        self._running.append((path, module))
        try:
            with no_python_randomness(type(module).__name__):
                yield
        except Unsupported as error:
            raise self.refused(error) from error.__cause__
        except Exception as error:
            self.failed(line_of(error) or self.origin)
            raise
        finally:
            self._running.pop()

    def begin_loss(self) -> None:
        """Attribute what follows to the loss instead of the model."""
        self.origin = LOSS

    def output(self, value: Any) -> None:
        for name in self._constants.changing:
            self.writes.store(self._attribute_nodes[name])
        update_info(self.graph.output(map_tree(value, self._argument)), source="output")

    def record(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str | None = None
    ) -> Any:
        """Run a call at all batch sizes and make its node; plain Python that is the same at all of them is returned."""
        try:
            call = Call(op, target, map_tree(tuple(args), self._traced), map_tree(dict(kwargs), self._traced))
            answer = self.queries.answer(call)
            return self._record(call, name) if answer is NotImplemented else answer
        except Unsupported as error:
            raise self.refused(error) from error.__cause__

    def torch_call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A torch function or tensor method that was reached through `__torch_function__`."""
        op, target, args = operation(function, args, kwargs)
        before, _, each = getattr(function, "__name__", "").partition("_foreach_")
        if each and not before:
            return tuple(self.record("call_method", each, own, named) for own, named in each_of(args, kwargs))
        draws = self.random.form(Call(op, target, args, kwargs)) is not None
        if not draws and not any(isinstance(v, torch.Tensor) or is_proxy(v) for v in leaves((args, kwargs))):
            return function(*args, **kwargs)  # changes a setting, or makes a tensor that is constant
        return self.record(op, target, args, kwargs)

    def _record(self, call: Call, name: str | None) -> Any:
        if (form := self.random.form(call)) is not None:
            return self.random.run(form, call)
        if (how := chunks_in(call)) is not None:
            if not self.joins:
                raise Unsupported(f"{call.name} divides the batch; sum a loss over its parts, with reduction='sum'")
            whole = Call("call_function", chunk_of, call.args[:1], how)
            return (self._result(whole, call.args[0]._values),)
        if call.target is setattr:
            call = self.writes.data_set(call)
        self.evaluator.unrecorded(lambda: require_recordable(call))
        new = functional(normalized(with_rows(call, self._constants, self.record)))
        if new.target is assigned and is_assigned(new):
            return new.written
        try:
            values = self.evaluator.values(new)
        except DYNAMIC as error:
            return self._constant(new, error)
        result = self._result(with_sizes(new, values), values, name)
        return result if new.written is None else self.writes.write(new.written, result, call.name)

    def _result(self, call: Call, values: tuple[Any, ...], name: str | None = None) -> Any:
        """The value as plain Python, or a proxy of a new node; a tuple of these for a tuple."""
        is_constant = not (call.inputs or isinstance(values[0], torch.Tensor))
        if self.guards.fixes(call, values, self.source) or is_plain(values) or is_constant:
            return values[0]
        node = self._node(call, name)
        about_device = call.target is getattr and call.args[1] == "device"
        if not about_device and any(value._node in self._batched for value in call.inputs):
            self._batched.add(node)
        return self._wrapped(node, values)

    def _wrapped(self, node: fx.Node, values: tuple[Any, ...]) -> Any:
        """The proxy, or the tuple of proxies, that the user's code receives for a node."""
        first = values[0]
        found = [parts(value) for value in values]
        if found[0] is not None:
            self.values[node] = values
            if any(each is None or each.keys() != found[0].keys() for each in found):
                raise Unsupported(
                    f"{node.name} makes as many tensors as the batch has examples, and ranks run other batches than "
                    f"the example's; use operations over the whole batch"
                )
            keys = list(first) if isinstance(first, Mapping) else range(len(found[0]))
            if not isinstance(first, (Mapping, tuple, list)):
                keys = list(found[0])
            named = zip(found[0], keys, strict=True)
            made = {name: self._part(node, key, tuple(each[name] for each in found if each)) for name, key in named}
            return with_parts(first, made)
        if first is Unread:
            return first
        if isinstance(first, (bool, int, float)):
            return self._proxy(node, values if len(values) > 2 else self.evaluator.size_at_probes(values))
        if not isinstance(first, (torch.Tensor, torch.device)):
            raise Unsupported(f"{node.name} gives a {type(first).__name__}; keep to what gives tensors and numbers")
        if isinstance(first, torch.Tensor) and (kind := unusual(first)):
            raise Unsupported(f"{node.name} is {kind[0]}, which a graph cannot hold; keep it dense ({kind[1]})")
        proxy = self._proxy(node, values)
        if isinstance(first, torch.Tensor) and not torch.is_grad_enabled() and self._hides_gradient(node):
            with torch.enable_grad():
                return self.record("call_method", "detach", (proxy,), {})
        return proxy

    def _part(self, node: fx.Node, key: Any, values: tuple[Any, ...]) -> Any:
        if is_plain(values):
            return values[0]
        is_field = not isinstance(self.values[node][0], (tuple, list, Mapping))
        part = self.graph.call_function(getattr if is_field else operator.getitem, (node, key))
        set_info(part, info(node))
        if node in self._batched:
            self._batched.add(part)
        return self._wrapped(part, values)

    def _hides_gradient(self, node: fx.Node) -> bool:
        """Whether the value would require a gradient outside of `no_grad`."""
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()
        inputs = [*(self.values[n][0] for n in node.all_input_nodes), *module.parameters()]
        return any(getattr(value, "requires_grad", False) for value in inputs)

    def _constant(self, call: Call, error: Exception) -> Any:
        """The result of a data-dependent call, when its inputs are constants.  Raises Unsupported otherwise."""
        try:
            result = self.evaluator.unrecorded(
                lambda: self._constants.result(call.op, call.target, call.args, call.kwargs)
            )
        except NotConstant:
            raise Unsupported(f"{call.name} cannot be traced: {DATA}") from error
        return self._traced(result)

    def _node(self, call: Call, name: str | None = None) -> fx.Node:
        args, kwargs = map_tree(call.args, self._argument), map_tree(dict(call.kwargs), self._argument)
        node = self.graph.create_node(call.op, call.target, args, kwargs, name or self._node_name(call))
        update_info(node, source=self.source())
        update_info(node, module=call.target if call.op == "call_module" else self._running[-1][0])
        if call.op == "call_module" and isinstance(self.root.get_submodule(call.target), Region):
            update_info(node, draw=self.random.next())
        return node

    def _node_name(self, call: Call) -> str:
        path, module = self._running[-1]
        if call.target is getattr:
            return identifier(str(call.args[1]))
        if call.target is assigned:
            return str(call.args[0]._node.name).rstrip("0123456789").rstrip("_")
        is_small = path and not any(True for _ in module.children())
        return identifier(path, module) if is_small else call.name.strip("_")

    def _proxy(self, node: fx.Node, values: tuple[Any, ...]) -> Traced:
        self.values[node] = values
        if not isinstance(values[0], torch.Tensor):
            return TracedNumber(self, node, values)
        self.writes.aliasing.add(node, self.writes.storage(values[0]))
        self._proxies[node] = self.evaluator.unrecorded(lambda: TracedTensor(self, node, values))
        return self._proxies[node]

    def _argument(self, value: Any) -> Any:
        """A leaf of the arguments as an argument of a node."""
        if is_proxy(value):
            self.writes.aliasing.require_fresh(value._node)
            return value._node
        return value

    def _traced(self, value: Any) -> Any:
        """A leaf of the arguments with tensors as proxies and numpy numbers as Python's."""
        if is_proxy(value):
            return value
        if isinstance(value, torch.Tensor):
            return self._attribute(self.attributes.name(value))
        if isinstance(value, range):
            return list(value)
        return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value

    def attribute_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The proxy of a tensor that the model owns; any other tensor unchanged."""
        name = self.attributes.known(tensor)
        return tensor if name is None else self._attribute(name)

    def _attribute(self, name: str) -> TracedTensor:
        if name not in self._attribute_nodes:
            tensor = self.evaluator.unrecorded(lambda: self.fake.from_tensor(self.attributes.traced(name)))
            self._attribute_nodes[name] = node = self.graph.create_node("get_attr", name, (), {}, identifier(name))
            update_info(node, source=self.source(), module=name.rpartition(".")[0])
            self.writes.owned[id(self._proxy(node, (tensor, tensor)))] = name
        return self._proxies[self._attribute_nodes[name]]

    def source(self) -> str:
        """The user's file and line, or `origin` where torch's own code was called."""
        return user_line() or self.origin

    def plain(self, proxy: Any, what: str) -> Any:
        """A value that is the same for every batch (see `Queries.plain`).  Raises CaptureError."""
        try:
            return self.queries.plain(proxy, what)
        except Unsupported as error:
            raise self.refused(error) from None

    def refused(self, error: Unsupported) -> CaptureError:
        """The error for the user, with the file and line."""
        line = error.line or self.source()
        found = CaptureError(f"{line}: {error}")
        if not isinstance(error, Failed) and self.refusal is None:
            self.failure = None
            self.failed(None if error.stays else line)
            self.refusal = found
        return found

    def failed(self, line: str | None) -> None:
        """Note where the trace failed first; None where no region may hold it."""
        path, module = self._running[-1]
        if self.failure is None and self.refusal is None and line is not None:
            self.failure = Failure(LOSS if self.origin == LOSS and not path else path, type(module), line)

    def refuse(self, text: str, stays: bool = False) -> NoReturn:
        """Raise the error for the user.  stays: see `Unsupported`."""
        raise self.refused(Unsupported(text, stays=stays))

    def lost(self, function: Any) -> NoReturn:
        """Refuse a call that handed a traced tensor to C++ code without `__torch_function__`."""
        self.refuse(f"{function} is called in a way that cannot be traced; use torch functions and tensor methods")
