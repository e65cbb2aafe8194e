"""Compute while transfers travel: the gradients of weights, which nothing waits for before the end of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
        y = F.linear(x.detach(), weight.detach(), None if bias is None else bias.detach()).detach()  # which is no view
        watched: Tensor = _Later.apply(x, y, weight, bias, self)  # type: ignore[no-untyped-call]
        return watched

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


class _Later(torch.autograd.Function):
    """A linear layer that was computed; its backward gives the gradient of its input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x.detach().to(y.dtype))
        ctx.parameters, ctx.deferred, ctx.dtype = (weight, bias), deferred, x.dtype
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (weight, bias) = ctx.saved_tensors, ctx.parameters
        ctx.deferred.later(lambda: _add_gradients(weight, bias, x, error))
        return (error @ weight.detach().to(error.dtype).conj()).to(ctx.dtype), None, None, None, None


def _add_gradients(weight: Tensor, bias: Tensor | None, x: Tensor, error: Tensor) -> None:
    rows = error.flatten(0, -2)
    add_to_grad(weight, rows.t() @ x.flatten(0, -2).conj())
    if bias is not None:
        add_to_grad(bias, rows.sum(0))


def add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Add to a parameter's gradient, in the parameter's dtype."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient + parameter.grad
    else:
        parameter.grad += gradient
