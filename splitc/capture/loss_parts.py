"""Measure the terms of a loss on a few examples: their values, and their gradients for some parameters.

The ranks' shares of a term must add up in value and in gradient.  Values alone do not show it: where examples are alike
the root of a mean is nearly the mean of the roots, but their gradients differ.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from splitc.capture.example import Example
from splitc.errors import CaptureError
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner
from splitc.ir.program import Program, TensorSpec
from splitc.runtime.collectives.loss import target_weight

EXAMPLES = 3
_WATCHED = 1 << 20  # elements of the parameters, smallest first, whose gradients are measured

Steady = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class LossPart:
    """A term over some of the examples.

    weight: the sum of their targets' weights in a weighted mean, else 1.  gradient: flattened, None without one.
    """

    value: float
    weight: float
    gradient: torch.Tensor | None

    @property
    def gradient_norm(self) -> float:
        """The L2 norm of the gradient."""
        return 0.0 if self.gradient is None else float(self.gradient.norm())

    def scaled(self, factor: float) -> LossPart:
        """The term scaled by `factor`."""
        gradient = None if self.gradient is None else self.gradient * factor
        return LossPart(self.value * factor, self.weight, gradient)


Measured = dict[fx.Node, LossPart]


def tolerance(dtype: torch.dtype) -> float:
    """The relative rounding error allowed in a loss of this dtype."""
    return 2e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4


def is_weighted_mean(node: fx.Node) -> bool:
    """Whether `node` is a cross_entropy or nll_loss that divides by the weights of its targets."""
    if node.target not in (F.cross_entropy, F.nll_loss) or node.kwargs.get("reduction", "mean") != "mean":
        return False
    target = node.args[1]
    assert isinstance(target, fx.Node)
    spec = info(target).spec
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point


def sum_errors(whole: LossPart, first: LossPart, rest: LossPart, allowed: float) -> tuple[float, float]:
    """Errors of value and gradient of first + rest against the whole, in units of what rounding may cause."""
    largest = max(abs(part.value) for part in (whole, first, rest))
    value = abs(whole.value - first.value - rest.value) / (allowed * (largest + 1e-3))
    norms = [part.gradient_norm for part in (whole, first, rest)]
    if not all(map(math.isfinite, norms)) or not any(norms):
        return value, 0.0
    signed = [(whole.gradient, 1), (first.gradient, -1), (rest.gradient, -1)]
    difference = sum(gradient * sign for gradient, sign in signed if gradient is not None)
    assert isinstance(difference, torch.Tensor)
    return value, float(difference.norm()) / (5 * allowed * max(norms))


def measure(
    program: Program, root: nn.Module, example: Example, terms: Collection[fx.Node], steady: Steady
) -> tuple[Measured, ...]:
    """The terms on three examples, on the first and on the other two; tries other rows where one is 0 or not finite."""
    found: list[tuple[Measured, ...]] = []
    for start in range(0, min(example.batch, 8 * EXAMPLES), EXAMPLES):
        rows = [(start + k) % example.batch for k in range(EXAMPLES)]
        parts = [example.rows(rows[part]) for part in (slice(0, 3), slice(0, 1), slice(1, 3))]
        measured = tuple(_measure(program, root, part, terms, steady) for part in parts)
        numbers = [part.value for part in measured[0].values() if part.weight]
        if all(map(math.isfinite, numbers)):
            found.append(measured)
            if numbers and all(numbers):
                return measured
    if not found:
        raise CaptureError(
            f"{info(program.loss).source}: the loss is not finite on the example; give an example on which it is"
        )
    return found[0]


def _measure(
    program: Program, root: nn.Module, values: Mapping[str, Any], terms: Collection[fx.Node], steady: Steady
) -> Measured:
    out: Measured = {}
    watched = _watched(root)
    runner: NodeRunner

    def record(node: fx.Node, run: Any) -> Any:
        value = run()
        if node in terms:
            weight = 1.0
            if is_weighted_mean(node):
                options: Any = runner.map_nodes_to_values(dict(node.kwargs), node)
                target = runner.env[node.all_input_nodes[1]]
                weight = float(target_weight(target, options.get("weight"), options.get("ignore_index", -100)))
            out[node] = LossPart(float(value), weight, _gradient(value, watched))
        return value

    with steady(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some functions warn about a single example, std() for one
        runner = NodeRunner(root, program.graph, record)
        runner.run_named(values)
    return out


def _watched(root: nn.Module) -> list[nn.Parameter]:
    """The smallest trainable parameters; a coupling of examples shows in the gradient of any parameter."""
    by_size = sorted((p for p in root.parameters() if p.requires_grad), key=torch.Tensor.numel)
    totals = accumulate(p.numel() for p in by_size)
    return [p for k, (p, total) in enumerate(zip(by_size, totals, strict=True)) if k == 0 or total <= _WATCHED]


def _gradient(value: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor | None:
    """The gradient of a term as one vector; None for a term without one."""
    if not value.requires_grad:
        return None
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    parts = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in found if g is not None]
    return torch.cat([g.flatten().double() for g in parts]) if parts else None
