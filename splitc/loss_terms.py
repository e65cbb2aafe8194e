"""How a loss adds up over parts of the batch: the scalars it is a linear function of, each a sum or a mean.

    loss = cross_entropy(out, target) + 0.1 * activations.mean()     two terms
    loss = (per_example * mask).sum() / mask.sum()                   a term and its denominator

Whether a term is a sum or a mean over examples is measured: on three examples, on one of them and on the other two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from splitc.errors import CaptureError
from splitc.fake import NodeRunner
from splitc.program import LossTerm, Program, TensorSpec
from splitc.runtime.loss import target_weight

_SUMS = {"add", "sub", "rsub"}
_SCALED = {"mul", "truediv", "div", "neg"}
_SAME = {"clone", "contiguous", "double", "float", "mean", "reshape", "squeeze", "sum", "to", "view"}
_DENOMINATORS = {"clamp", "clamp_min", "add", "max", "maximum", "float", "to", "double"}
_EXAMPLES = 3

Steady = Callable[[], AbstractContextManager[None]]
Measured = dict[fx.Node, tuple[float, float]]
"""Value and weight of every term on some examples."""


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause in a loss of this precision."""
    return 2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4


def loss_terms(program: Program, root: nn.Module, example: Mapping[str, Any], steady: Steady) -> tuple[LossTerm, ...]:
    """The terms of the loss, measured on rows of `example` with the modules of `root` while `steady()` holds.

    Raises CaptureError for a term that is neither a sum nor a mean over examples.
    """
    terms = _Terms(program.graph, program.loss)
    terms.require_apart()
    whole, first, rest = _measure(program, root, example, terms.uses, steady)
    return tuple(
        LossTerm(node.name, _kind(node, use, terms.batched, whole[node], first[node], rest[node]))
        for node, use in terms.uses.items()
    )


def weighted_mean(node: fx.Node) -> bool:
    """Whether `node` is a cross entropy (or nll_loss) that divides by the weights of its targets."""
    if node.target not in (F.cross_entropy, F.nll_loss) or node.kwargs.get("reduction", "mean") != "mean":
        return False
    target = node.args[1]
    assert isinstance(target, fx.Node)
    spec = target.meta["spec"]
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point


def isolate_terms(graph: fx.Graph) -> None:
    """Copy what does not depend on the batch where the loss adds it: scaling the term must leave other readers alone.

    loss = task * exp(-s) + s   ->   loss = task * exp(-s) + s.clone()
    """
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    terms = _Terms(graph, output.all_input_nodes[0])
    for node in terms.sums:
        for value in node.all_input_nodes:
            if value not in terms.batched and len(value.users) > 1:
                with graph.inserting_before(node):
                    copy = graph.call_method("clone", (value,))
                copy.meta = dict(value.meta)
                node.replace_input_with(value, copy)


class _Terms:
    """`uses`: the scalars that the loss is a linear function of ("term"), and denominators of quotients of sums.

    `sums` are the nodes that add or subtract terms.
    """

    def __init__(self, graph: fx.Graph, loss: fx.Node) -> None:
        self.batched = _batched(graph)
        self.uses: dict[fx.Node, str] = {}
        self.sums: dict[fx.Node, None] = {}
        self._linear: set[fx.Node] = set()
        self._walk(loss)

    def require_apart(self) -> None:
        """Raise CaptureError for a term that is read by more than the sum it is a term of."""
        for node in self.uses:
            others = [user for user in node.users if user not in self._linear and user.op != "output"]
            if others:
                raise CaptureError(
                    f"{others[0].meta['source']}: {others[0].name} reads {node.name} ({node.meta['source']}), which is "
                    f"also a term of the loss, and a rank knows only its part of a term; compute the two apart"
                )

    def _walk(self, node: fx.Node) -> None:
        name = _name(node)
        inputs = node.all_input_nodes
        parts = [n for n in inputs if n in self.batched]
        linear = node in self.batched and all(map(_is_scalar, inputs))
        self._linear.add(node)
        if linear and name in _SUMS and not _added_number(node):
            self.sums[node] = None
            for value in inputs:
                self._walk(value)
        elif linear and name in ("truediv", "div") and node.args[-1] in parts:
            if node.args[0] in parts:
                self._walk(parts[0])
            self._denominator(parts[-1])
        elif linear and ((name in _SCALED and len(parts) == 1) or (name in _SAME and len(inputs) == 1)):
            self._walk(parts[0])
        else:
            self._term(node)

    def _term(self, node: fx.Node) -> None:
        hidden = next((n for n in _ancestors(node) if weighted_mean(n) or self._is_quotient(n)), None)
        if hidden is not None:
            number = _added_number(node)
            what = f"{node.name} adds {number:g} to" if number else f"{node.name} is no sum of"
            raise CaptureError(
                f"{node.meta['source']}: {hidden.name} ({hidden.meta['source']}) divides by a sum over the whole "
                f"batch, and {what} it: write the loss as a sum of such terms, without numbers added"
            )
        self.uses.setdefault(node, "term")

    def _is_quotient(self, node: fx.Node) -> bool:
        divisor = node.args[-1] if _name(node) in ("truediv", "div") else None
        return isinstance(divisor, fx.Node) and divisor in self.batched and _is_scalar(divisor)

    def _denominator(self, node: fx.Node) -> None:
        self._linear.add(node)
        parts = [n for n in node.all_input_nodes if n in self.batched]
        if _name(node) in _DENOMINATORS and len(parts) == 1 and _is_scalar(parts[0]):
            self._denominator(parts[0])
        elif node.meta["spec"].requires_grad:
            raise CaptureError(
                f"{node.meta['source']}: the loss divides by {node.name}, which depends on parameters and on the whole "
                f"batch; splitc sums denominators without gradient only; detach it"
            )
        else:
            self.uses[node] = "denominator"


def _kind(
    node: fx.Node,
    use: str,
    batched: set[fx.Node],
    whole: tuple[float, float],
    first: tuple[float, float],
    rest: tuple[float, float],
) -> str:
    """`LossTerm.kind` of a term, from its value and weight on three examples, on one and on the other two."""
    if node not in batched:
        return "mean"  # the same on every rank: each counts by its share
    allowed = tolerance(node.meta["spec"].dtype)
    a, b, c = (value for value, _ in (whole, first, rest))
    suffix = "" if use == "term" else " denominator"
    if weighted_mean(node):
        total, *parts = (value * weight if weight else 0.0 for value, weight in (whole, first, rest))
        if math.isclose(total, sum(parts), rel_tol=allowed, abs_tol=allowed / 1000):
            return "weighted"
    elif a == b == c == 0:
        return ("sum" if _name(node) == "sum" or node.kwargs.get("reduction") == "sum" else "mean") + suffix
    elif math.isclose(a, (b + 2 * c) / _EXAMPLES, rel_tol=allowed, abs_tol=allowed / 1000):
        return "mean" + suffix
    elif math.isclose(a, b + c, rel_tol=allowed, abs_tol=allowed / 1000):
        return "sum" + suffix
    raise CaptureError(
        f"{node.meta['source']}: the loss couples examples: {node.name} is {a:.6g} over 3 examples, {b:.6g} over the "
        f"first and {c:.6g} over the other two, neither their sum nor their mean; a rank that sees a part of the batch "
        f"cannot compute it (use a loss that is a sum, a mean or a weighted mean over examples)"
    )


def _measure(
    program: Program, root: nn.Module, example: Mapping[str, Any], terms: Mapping[fx.Node, str], steady: Steady
) -> tuple[Measured, ...]:
    """The terms on three examples, on the first, and on the other two; on others where a term is zero or not finite."""
    found: list[tuple[Measured, ...]] = []
    for rows in _choices(example):
        parts = [_take(example, rows[part]) for part in (slice(0, 3), slice(0, 1), slice(1, 3))]
        measured = tuple(_scalars(program, root, part, terms, steady) for part in parts)
        numbers = [value for value, weight in measured[0].values() if weight]
        if all(map(math.isfinite, numbers)):
            found.append(measured)
            if numbers and all(numbers):
                return measured
    if not found:
        raise CaptureError(
            f"{program.loss.meta['source']}: the loss is not finite on the example; give an example on which it is"
        )
    return found[0]


def _choices(example: Mapping[str, Any]) -> Iterator[list[int]]:
    """Three rows at a time, a few times."""
    batch = next(value.shape[0] for value in example.values() if isinstance(value, torch.Tensor))
    for start in range(0, min(batch, 8 * _EXAMPLES), _EXAMPLES):
        yield [(start + k) % batch for k in range(_EXAMPLES)]


def _take(example: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: value[rows].detach() if isinstance(value, torch.Tensor) else value for name, value in example.items()}


def _scalars(
    program: Program, root: nn.Module, inputs: Mapping[str, Any], terms: Mapping[fx.Node, str], steady: Steady
) -> Measured:
    out: Measured = {}
    runner: NodeRunner

    def keep(node: fx.Node, run: Any) -> Any:
        value = run()
        if node in terms:
            weight = 1.0
            if weighted_mean(node):
                options: Any = runner.map_nodes_to_values(dict(node.kwargs), node)
                target = runner.env[node.all_input_nodes[1]]
                weight = float(target_weight(target, options.get("weight"), options.get("ignore_index", -100)))
            out[node] = float(value), weight
        return value

    with torch.no_grad(), steady():
        runner = NodeRunner(root, program.graph, keep)
        runner.run_named(inputs)
    return out


def _batched(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on the batch."""
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
    """The plain number that a sum adds; 0 where there is none."""
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    return float(numbers[0]) if numbers and _name(node) in _SUMS else 0.0


def _is_scalar(node: fx.Node) -> bool:
    spec = node.meta["spec"]
    return isinstance(spec, TensorSpec) and spec.shape == ()


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
