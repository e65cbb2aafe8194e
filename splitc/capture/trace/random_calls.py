"""Record random functions as draws, numbered in the order of the calls: what eager code draws under `SeededRandom`.

y = F.dropout(x, 0.1)              ->  y = dropout(x, 0.1, draw=0)
keep = torch.rand(n, 1) < 0.9      ->  keep = uniform(torch.empty(n, 1), draw=1) < 0.9
F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
                                   ->  dropout(softmax(q @ k.T / sqrt(d)), 0.1, draw=2) @ v
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from splitc.capture.refusals import Unsupported, random_text
from splitc.capture.trace.calls import Call
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.graph import info, update_info
from splitc.ir.program import Program, TensorSpec
from splitc.ir.regions import regions
from splitc.runtime.seeded.draws import Label, Layout
from splitc.runtime.seeded.table import Form, Unseeded, form_of

Record = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Any]


class RandomCalls:
    """The draws of one trace.  record: makes a node.  write: lets all readers of a tensor read another one.

    attentions: calls of attention with dropout.
    """

    def __init__(self, record: Record, write: Callable[[Any, Any], Any]) -> None:
        self._record, self.write, self._draws, self.attentions = record, write, 0, 0

    @property
    def notes(self) -> list[str]:
        """A sentence for the report, where one is due."""
        calls = f"{self.attentions} call{'s' if self.attentions > 1 else ''}"
        text = (
            f"Attention with dropout ({calls}) is written out, since torch's fused kernels draw masks that depend on "
            f"the rank: its scores lie in memory, (length x length) for each head; dropout_p=0 keeps the fused kernel."
        )
        return [text] * bool(self.attentions)

    def form(self, call: Call) -> Form | None:
        """What computes the call from draws; None for a call that draws nothing."""
        return None if call.op == "call_module" else form_of(call.target, call.args, call.kwargs)

    def run(self, form: Form, call: Call) -> Any:
        """Compute the call.  Raises Unsupported for one that cannot be seeded by example."""
        self.attentions += call.name == "scaled_dot_product_attention"
        try:
            return form(self, *call.args, **call.kwargs)
        except Unseeded as error:
            raise Unsupported(random_text(f"{call.name} ({error})" if str(error) != call.name else call.name)) from None

    def next(self) -> int:
        """The ordinal of the next draw; a module that is one node and draws inside takes one for all of its draws."""
        self._draws += 1
        return self._draws - 1

    def dropout(self, value: Any, p: float, feature_dims: int) -> Any:
        options = {"draw": self.next(), **({"feature_dims": feature_dims} if feature_dims else {})}
        return self._record("call_function", comm_ops.dropout, (value, p), options)

    def uniform(self, like: Any) -> Any:
        return self._record("call_function", comm_ops.uniform, (like,), {"draw": self.next()})

    def normal(self, like: Any) -> Any:
        return self._record("call_function", comm_ops.normal, (like,), {"draw": self.next()})

    def inside(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


def locate_draws(graph: fx.Graph) -> None:
    """Give every draw the batch dimension of its value.  Raises CaptureError where it has examples in two dims."""
    for node in graph.nodes:
        if node.target in comm_ops.DRAWS:
            spec = info(node).spec
            if not isinstance(spec, TensorSpec):
                raise CaptureError(
                    f"{info(node).source}: {node.name} draws random numbers for pairs of examples, or for a part of "
                    f"the batch, and each rank has other examples; draw one row for each example"
                )
            if spec.batch_dim != 0:
                node.update_kwarg("dim", spec.batch_dim)
            if spec.batch_dim is not None and spec.rows != 1:
                node.update_kwarg("rows", spec.rows)


def located(program: Program) -> Program:
    """The program whose nodes know that the rows of an example lie apart."""
    for node in program.graph.nodes:
        if node.name in program.flattened:
            update_info(node, outer=program.flattened[node.name])
            if node.target in comm_ops.DRAWS and program.flattened[node.name]:
                node.update_kwarg("outer", program.flattened[node.name])
    return program


def draw_layouts(program: Program) -> dict[Label, Layout]:
    """Where the examples of each draw lie, as eager code needs to know it."""
    options = [node.kwargs for node in program.graph.nodes if node.target in comm_ops.DRAWS]
    found: dict[Label, Layout] = {}
    for node, own in regions(program):
        found |= {(info(node).draw or 0, k): layout for k, layout in enumerate(own.draws)}
    return found | {(each["draw"],): Layout(**{k: each[k] for k in Layout._fields if k in each}) for each in options}
