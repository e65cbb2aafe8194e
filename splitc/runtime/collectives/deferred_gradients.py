"""Compute while transfers travel: the gradients of weights, which nothing waits for before the end of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class DeferredGradients:
    """Computations of one rank that can be done at any time before the end of its step."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` whose backward computes the gradient of `x`, and leaves those of weight and bias for later.

        x: (..., in).  Of one row, without grad mode, or where something is not trained, this is plain `F.linear`.
        """
        trained = all(each.requires_grad for each in (x, weight, bias) if each is not None)
        if not (torch.is_grad_enabled() and trained and x.dim() > 1):
            return F.linear(x, weight, bias)
        rows = x.flatten(0, -2)  # of more dims F.linear may give a view, whose error autograd would copy thrice
        y = F.linear(rows, weight.detach(), None if bias is None else bias.detach())
        add = partial(add_linear_gradients, weight, bias)
        y = watched(y, lambda *factors: self.later(partial(add, *factors)), rows.detach().to(y.dtype))
        return y.view(*x.shape[:-1], y.size(-1))

    def later(self, call: Callable[[], None]) -> None:
        """Do something before the end of the step."""
        self._calls.append(call)

    def one(self) -> None:
        """Do the first thing that is left, if any: a transfer was just begun, and its result is needed next."""
        if self._calls:
            with torch.no_grad():
                self._calls.popleft()()

    def finish(self) -> None:
        """Do all that is left."""
        while self._calls:
            self.one()


def watched(y: Tensor, arrived: Callable[..., None], *values: Tensor) -> Tensor:
    """The output `y` of a layer; backward calls `arrived` with `values` and the error of `y`, before that goes on."""
    anchor = y.new_empty(0, requires_grad=True)  # so that backward runs here even when nothing before y needs it
    found: Tensor = _WatchError.apply(y, anchor, arrived, *values)  # type: ignore[no-untyped-call]
    return found


class _WatchError(torch.autograd.Function):
    """The identity on a layer's output; its backward notes the error before that goes on.

    A function and not a tensor hook: it also runs when `x` needs no gradient, later operations may change the output
    in place, and autograd detects an `x` that was changed in place after it was saved.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, arrived: Callable[..., None], *values: Tensor) -> Tensor:
        ctx.arrived = arrived
        ctx.save_for_backward(*values)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        ctx.arrived(*ctx.saved_tensors, error)
        return error, None, None, *[None] * len(ctx.saved_tensors)


def rows_of(factor: Tensor) -> Tensor:
    """The rows of a factor of a gradient, as a matrix."""
    return (factor if factor.dim() > 1 else factor.unsqueeze(0)).flatten(0, -2)


def add_linear_gradients(weight: Tensor, bias: Tensor | None, *factors: Tensor) -> None:
    """Add those of a linear layer: of X (rows, in), where the weight is trained, and E (rows, out)."""
    *inputs, errors = factors
    if inputs:
        add_to_grad(weight, errors.t() @ inputs[0].conj())
    if bias is not None:
        add_to_grad(bias, errors.sum(0, dtype=bias.dtype))


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, in the parameter's dtype."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad += gradient
