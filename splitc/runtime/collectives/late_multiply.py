"""Late multiply: replicas of a linear layer exchange the factors of its weight gradient, not the gradient.

The gradient of a weight (out, in) is E^T X, for inputs X (rows, in) and output errors E (rows, out).  Where the layer
is wide and the batch small, X and E of all replicas are fewer bytes than the gradient (Practical Lessons, section 2.1):
each replica gathers them, and multiplies late, once.

Both gathers start when E is computed in backward, and run while autograd computes the input's gradient and the layers
below.  `finish` waits for them and multiplies.

Its cost: every replica computes the weight gradient of all replicas' rows, n times the FLOPs of data parallelism, and
holds the gathered X and E from backward to `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transport.base import Transport, Work, describe


class LateMultiply:
    """The late-multiplied layers of one rank; `ranks` are the replicas that hold the same weights.

    sent_bytes: payload bytes that this rank has sent: (n-1) times its own X and E.

    Raises ValueError when `ranks` do not hold this one.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not one of the replicas {self.ranks}")
        self.index = self.ranks.index(transport.rank)
        self.sent_bytes = 0
        self._transport = transport
        self._uses: list[_Use] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: Sequence[int]) -> Tensor:
        """`F.linear` whose gradients of weight and bias come with `finish`, summed over the replicas.

        rows: how many rows each replica has at this use, the product of all dims of its `x` but the last.
        Autograd computes the gradient of `x` only; without grad mode, where neither weight nor bias is trained and on
        a single rank this is plain `F.linear`.
        Raises ValueError when `rows` do not fit the replicas or `x`.
        """
        if len(rows) != len(self.ranks) or rows[self.index] * weight.size(1) != x.numel():
            raise ValueError(
                f"late multiply of {describe(x)} with weight {describe(weight)} on replica {self.index} of "
                f"{len(self.ranks)}, but the replicas' rows are {list(rows)}"
            )
        parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
        if len(self.ranks) == 1 or not parameters or not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        y = F.linear(x, weight.detach(), None if bias is None else bias.detach())
        # Under autocast the layer multiplies in y's dtype; X travels and is kept in it too.
        inputs = x.detach().to(y.dtype) if weight.requires_grad else None
        anchor = y.new_empty(0, requires_grad=True)  # so that backward runs here even when x needs no gradient
        start = partial(self._gather, weight, bias, rows)
        watched: Tensor = _WatchError.apply(y, anchor, inputs, start)  # type: ignore[no-untyped-call]
        return watched

    def finish(self) -> None:
        """Add the gradients of all replicas' rows to `.grad`; the same bits on every replica.

        Call it after backward and before the optimizer steps.  Uses are processed in the order of backward.
        """
        with torch.no_grad(), torch.autocast(self._transport.device.type, enabled=False):
            while self._uses:
                self._uses.pop(0).add_gradients()

    def _gather(
        self, weight: Tensor, bias: Tensor | None, rows: Sequence[int], inputs: Tensor | None, error: Tensor
    ) -> None:
        """Start the gathers of one use."""
        use = _Use(weight, bias if bias is not None and bias.requires_grad else None)
        if inputs is not None:
            use.inputs = self._start(use, inputs, rows)
        use.errors = self._start(use, error, rows)
        self._uses.append(use)

    def _start(self, use: _Use, own: Tensor, rows: Sequence[int]) -> Tensor:
        """Start to gather (rows, features) of all replicas; the tensor that will hold them."""
        own = own.reshape(-1, own.size(-1))
        whole = own.new_empty(sum(rows), own.size(1))
        use.works.append(self._transport.all_gather(list(whole.split(list(rows))), own, self.ranks))
        self.sent_bytes += (len(self.ranks) - 1) * own.nbytes
        return whole


class _Use:
    """One backward through one late-multiplied layer: its parameters, and the gathers of their gradients' factors.

    inputs: None when the weight is not trained.  bias: None when it is not trained.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.inputs: Tensor | None = None
        self.errors = weight.new_empty(0)
        self.works: list[Work] = []

    def add_gradients(self) -> None:
        for work in self.works:
            work.wait()
        if self.inputs is not None:
            _add_to_grad(self.weight, self.errors.t() @ self.inputs.conj())
        if self.bias is not None:
            _add_to_grad(self.bias, self.errors.sum(0, dtype=self.bias.dtype))


class _WatchError(torch.autograd.Function):
    """The identity on a linear layer's output; its backward starts the gathers before the error goes on.

    A function and not a tensor hook: it also runs when `x` needs no gradient, later operations may change the output
    in place, and autograd detects an `x` that was changed in place after it was saved.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, anchor: Tensor, inputs: Tensor | None, start: Callable[[Tensor | None, Tensor], None]
    ) -> Tensor:
        ctx.start = start
        ctx.save_for_backward(inputs)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        ctx.start(*ctx.saved_tensors, error)
        return error, None, None, None


def _add_to_grad(parameter: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
