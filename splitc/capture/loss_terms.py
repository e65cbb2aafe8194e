"""Decompose a loss into terms: the scalars that it is a linear function of, each a sum or a mean over examples.

    loss = cross_entropy(out, target) + 0.1 * activations.mean()     two terms
    loss = (per_example * mask).sum() / mask.sum()                   a term and its denominator

Whether a term is a sum or a mean is measured: on three examples, on the first and on the other two (see `loss_parts`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from splitc.capture.example import Example
from splitc.capture.loss_parts import EXAMPLES, LossPart, Steady, is_weighted_mean, measure, sum_errors, tolerance
from splitc.errors import CaptureError
from splitc.ir.graph import info, op_name, set_info, tensor_spec
from splitc.ir.layers import LossTerm
from splitc.ir.program import Program, TensorSpec

_SUMS = {"add", "sub", "rsub"}
_SCALED = {"mul", "truediv", "div", "neg"}
_SAME = {"clone", "contiguous", "double", "float", "mean", "reshape", "squeeze", "sum", "to", "view"}
_DENOMINATORS = {"clamp", "clamp_min", "add", "max", "maximum", "float", "to", "double"}
_NONLINEAR = {
    "exp", "expm1", "log", "log1p", "pow", "reciprocal", "rsqrt", "sigmoid", "softplus", "sqrt", "square", "tanh",
}  # fmt: skip


def loss_terms(program: Program, root: nn.Module, example: Example, steady: Steady) -> tuple[LossTerm, ...]:
    """The terms of the loss, measured on rows of `example` with the modules of `root`, under `steady()`.

    Raises CaptureError for a term that is neither a sum nor a mean over examples.
    """
    terms = _Terms(program.graph, program.loss)
    terms.require_apart()
    whole, first, rest = measure(program, root, example, terms.uses, steady)
    return tuple(
        LossTerm(node.name, _kind(node, use, terms.batched, whole[node], first[node], rest[node]))
        for node, use in terms.uses.items()
    )


def isolate_terms(graph: fx.Graph) -> None:
    """Clone terms that do not depend on the batch, so that scaling one leaves its other readers unchanged.

    loss = task * exp(-s) + s   ->   loss = task * exp(-s) + s.clone()
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    terms = _Terms(graph, output.all_input_nodes[0])
    for node in terms.sums:
        for value in node.all_input_nodes:
            if value not in terms.batched and len(value.users) > 1:
                with graph.inserting_before(node):
                    copy = graph.call_method("clone", (value,))
                set_info(copy, info(value))
                node.replace_input_with(value, copy)


class _Terms:
    """The decomposition of a loss.

    uses: its terms, and the denominators of quotients, each "term" or "denominator".  sums: nodes that add or subtract
    terms.  batched: nodes that depend on the batch.
    """

    def __init__(self, graph: fx.Graph, loss: fx.Node) -> None:
        self.batched = _batched(graph)
        self.uses: dict[fx.Node, str] = {}
        self.sums: dict[fx.Node, None] = {}
        self._linear: set[fx.Node] = set()
        self._walk(loss)

    def require_apart(self) -> None:
        """Raise CaptureError for a term that a node other than its sum reads."""
        for node in self.uses:
            others = [user for user in node.users if user not in self._linear and user.op != "output"]
            if others:
                raise CaptureError(
                    f"{info(others[0]).source}: {others[0].name} reads {node.name} ({info(node).source}), which is "
                    f"also a term of the loss, and a rank knows only its part of a term; compute the two apart"
                )

    def _walk(self, node: fx.Node) -> None:
        name, inputs = op_name(node), node.all_input_nodes
        parts = [n for n in inputs if n in self.batched]
        linear = node in self.batched and all(map(_is_scalar, inputs))
        if linear and name in _SUMS and not _added_number(node):
            self.sums[node] = None
            terms = inputs
        elif linear and self._is_quotient(node):
            terms = parts[:1] if node.args[0] in parts else []
        elif linear and ((name in _SCALED and len(parts) == 1) or (name in _SAME and len(inputs) == 1)):
            terms = parts
        else:
            self._term(node)
            return
        self._linear.add(node)
        for value in terms:
            self._walk(value)
        if self._is_quotient(node):
            self._denominator(parts[-1])

    def _term(self, node: fx.Node) -> None:
        hidden = next((n for n in _ancestors(node) if is_weighted_mean(n) or self._is_quotient(n)), None)
        if hidden is not None:
            number = _added_number(node)
            what = f"{node.name} adds {number:g} to" if number else f"{node.name} is no sum of"
            raise CaptureError(
                f"{info(node).source}: {hidden.name} ({info(hidden).source}) divides by a sum over the whole "
                f"batch, and {what} it: write the loss as a sum of such terms, without numbers added"
            )
        whole = next((n for n in node.all_input_nodes if n in self.batched and _is_scalar(n)), None)
        if whole is not None and op_name(node) in _NONLINEAR:
            raise CaptureError(
                f"{info(node).source}: the loss couples examples: {node.name} is no linear function of {whole.name} "
                f"({info(whole).source}), which is over the whole batch; a rank that sees a part of the batch cannot "
                f"compute it (take {op_name(node)} of each example, or leave it out)"
            )
        self.uses.setdefault(node, "term")

    def _is_quotient(self, node: fx.Node) -> bool:
        divisor = node.args[-1] if op_name(node) in ("truediv", "div") else None
        return isinstance(divisor, fx.Node) and divisor in self.batched and _is_scalar(divisor)

    def _denominator(self, node: fx.Node) -> None:
        parts = [n for n in node.all_input_nodes if n in self.batched]
        if op_name(node) in _DENOMINATORS and len(parts) == 1 and _is_scalar(parts[0]):
            self._linear.add(node)
            self._denominator(parts[0])
        elif tensor_spec(node).requires_grad:
            raise CaptureError(
                f"{info(node).source}: the loss divides by {node.name}, which depends on parameters and on the whole "
                f"batch; splitc sums denominators without gradient only; detach it"
            )
        else:
            self.uses[node] = "denominator"


def _kind(node: fx.Node, use: str, batched: set[fx.Node], whole: LossPart, first: LossPart, rest: LossPart) -> str:
    """`LossTerm.kind` of a term, from its measurements on three examples, the first and the other two."""
    if node not in batched:
        return "mean"  # the same on every rank, which counts by its share of the batch
    allowed = tolerance(tensor_spec(node).dtype)
    suffix = "" if use == "term" else " denominator"
    if is_weighted_mean(node):
        total, *parts = (p.scaled(p.weight) if p.weight else LossPart(0.0, 0.0, None) for p in (whole, first, rest))
        errors = {"weighted": sum_errors(total, parts[0], parts[1], allowed)}
    elif whole.value == first.value == rest.value == 0 == whole.gradient_norm:
        return ("sum" if op_name(node) == "sum" or node.kwargs.get("reduction") == "sum" else "mean") + suffix
    else:
        shares = first.scaled(1 / EXAMPLES), rest.scaled(1 - 1 / EXAMPLES)
        errors = {"mean": sum_errors(whole, *shares, allowed), "sum": sum_errors(whole, first, rest, allowed)}
    kind = min(errors, key=lambda name: max(errors[name]))
    if max(errors[kind]) <= 1:
        return kind + suffix
    a, b, c = whole.value, first.value, rest.value
    raise CaptureError(
        f"{info(node).source}: the loss couples examples: {node.name} is {a:.6g} over 3 examples, {b:.6g} over the "
        f"first and {c:.6g} over the other two, {'' if errors[kind][0] > 1 else 'and its gradient is '}neither their "
        f"sum nor their mean; a rank that sees a part of the batch cannot compute it (use a loss that is a sum, a mean "
        f"or a weighted mean over examples)"
    )


def _batched(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on the batch."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _ancestors(node: fx.Node) -> Iterator[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(node.all_input_nodes)
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            yield value
            todo += value.all_input_nodes


def _added_number(node: fx.Node) -> float:
    """The Python number that a sum adds; 0 where there is none."""
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    return float(numbers[0]) if numbers and op_name(node) in _SUMS else 0.0


def _is_scalar(node: fx.Node) -> bool:
    spec = info(node).spec
    return isinstance(spec, TensorSpec) and spec.shape == ()
