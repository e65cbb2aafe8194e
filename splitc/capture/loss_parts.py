"""The terms of a loss on a few examples: their values, and their gradients for some parameters.

What a rank computes of a term must add up, in value and in gradient.  The gradient shows what the value hides: the root
of a mean is nearly the mean of roots where examples are alike, but its gradient is not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from splitc.errors import CaptureError
from splitc.ir.interpreter import NodeRunner
from splitc.ir.program import Program, TensorSpec
from splitc.runtime.collectives.loss import target_weight

EXAMPLES = 3
_WATCHED = 1 << 20  # parameters whose gradients are measured: the smallest ones, to this many numbers

Steady = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class LossPart:
    """A term on some examples.

    weight: that of their targets, where the term is a weighted mean.  gradient: as one vector; None where it has none.
    """

    value: float
    weight: float
    gradient: torch.Tensor | None

    @property
    def size(self) -> float:
        """The norm of the gradient."""
        return 0.0 if self.gradient is None else float(self.gradient.norm())

    def times(self, factor: float) -> LossPart:
        """The term multiplied by a number."""
        gradient = None if self.gradient is None else self.gradient * factor
        return LossPart(self.value * factor, self.weight, gradient)


Measured = dict[fx.Node, LossPart]


def tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding may cause in a loss of this precision."""
    return 2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4


def weighted_mean(node: fx.Node) -> bool:
    """Whether `node` is a cross entropy (or nll_loss) that divides by the weights of its targets."""
    if node.target not in (F.cross_entropy, F.nll_loss) or node.kwargs.get("reduction", "mean") != "mean":
        return False
    target = node.args[1]
    assert isinstance(target, fx.Node)
    spec = target.meta["spec"]
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point


def misses(whole: LossPart, first: LossPart, rest: LossPart, allowed: float) -> tuple[float, float]:
    """How far value and gradient over the whole are from the sum of two parts; 1: as far as rounding may put them."""
    largest = max(abs(part.value) for part in (whole, first, rest))
    value = abs(whole.value - first.value - rest.value) / (allowed * (largest + 1e-3))
    sizes = [part.size for part in (whole, first, rest)]
    if not all(map(math.isfinite, sizes)) or not any(sizes):
        return value, 0.0
    signed = [(whole.gradient, 1), (first.gradient, -1), (rest.gradient, -1)]
    missing = sum(gradient * sign for gradient, sign in signed if gradient is not None)
    assert isinstance(missing, torch.Tensor)
    return value, float(missing.norm()) / (5 * allowed * max(sizes))


def measure(
    program: Program, root: nn.Module, example: Mapping[str, Any], terms: Collection[fx.Node], steady: Steady
) -> tuple[Measured, ...]:
    """The terms on three examples, on one and on two of them; on other ones where a term is zero or not finite."""
    found: list[tuple[Measured, ...]] = []
    for rows in _choices(example):
        parts = [_take(example, rows[part]) for part in (slice(0, 3), slice(0, 1), slice(1, 3))]
        measured = tuple(_parts(program, root, part, terms, steady) for part in parts)
        numbers = [part.value for part in measured[0].values() if part.weight]
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
    for start in range(0, min(batch, 8 * EXAMPLES), EXAMPLES):
        yield [(start + k) % batch for k in range(EXAMPLES)]


def _take(example: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    return {name: value[rows].detach() if isinstance(value, torch.Tensor) else value for name, value in example.items()}


def _parts(
    program: Program, root: nn.Module, inputs: Mapping[str, Any], terms: Collection[fx.Node], steady: Steady
) -> Measured:
    out: Measured = {}
    watched = _watched(root)
    runner: NodeRunner

    def keep(node: fx.Node, run: Any) -> Any:
        value = run()
        if node in terms:
            weight = 1.0
            if weighted_mean(node):
                options: Any = runner.map_nodes_to_values(dict(node.kwargs), node)
                target = runner.env[node.all_input_nodes[1]]
                weight = float(target_weight(target, options.get("weight"), options.get("ignore_index", -100)))
            out[node] = LossPart(float(value), weight, _gradient(value, watched))
        return value

    with steady(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a single example cannot give: a deviation, say
        runner = NodeRunner(root, program.graph, keep)
        runner.run_named(inputs)
    return out


def _watched(root: nn.Module) -> list[nn.Parameter]:
    """The smallest trainable parameters: coupling shows in the gradient of any of them."""
    by_size = sorted((p for p in root.parameters() if p.requires_grad), key=torch.Tensor.numel)
    totals = accumulate(p.numel() for p in by_size)
    return [p for k, (p, total) in enumerate(zip(by_size, totals, strict=True)) if k == 0 or total <= _WATCHED]


def _gradient(value: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor | None:
    """The gradient of a term as one vector; None for a term that has none."""
    if not value.requires_grad:
        return None
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in found if g is not None]
    return torch.cat([g.flatten().double() for g in parts]) if parts else None
