"""Late multiply: replicas of a linear layer exchange the factors of its weight gradient, not the gradient.

The gradient of a weight (out, in) is E^T X, for inputs X (rows, in) and output errors E (rows, out).  Where the layer
is wide and the batch small, X and E of all replicas are fewer bytes than the gradient (Practical Lessons, section 2.1):
each replica gathers them, and multiplies late, once.

The factors of all late-multiplied layers of one dtype travel in one gather.  It starts in backward when the last error
is there, before the layers below go backward.  `finish` waits for it and multiplies.

Its cost: every replica computes the weight gradient of all replicas' rows, n times the FLOPs of data parallelism, and
holds the gathered X and E from backward to `finish`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives.deferred_gradients import add_to_grad
from ..transport.base import Transport, Work, describe


class LateMultiply:
    """The late-multiplied layers of one rank; `ranks` are the replicas that hold the same weights.

    Raises ValueError when `ranks` do not hold this one.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not one of the replicas {self.ranks}")
        self.index = self.ranks.index(transport.rank)
        self.transport = transport
        self._awaited = 0  # uses whose errors are to come
        self._uses: list[_Use] = []  # those whose errors have come
        self._packs: list[tuple[list[_Use], Sequence[Tensor], Work]] = []  # under way

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, rows: Sequence[int], is_last: bool = True
    ) -> Tensor:
        """`F.linear` whose gradients of weight and bias come with `finish`, summed over the replicas.

        rows: how many rows each replica has at this use, the product of all dims of its `x` but the last.
        is_last: False in all microbatches but the last one; the factors of all travel together.
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
        self._awaited += 1
        trained = bias if bias is not None and bias.requires_grad else None
        arrived = partial(self._arrived, is_last, partial(_Use, weight, trained, rows))
        watched: Tensor = _WatchError.apply(y, anchor, inputs, arrived)  # type: ignore[no-untyped-call]
        return watched

    def finish(self) -> None:
        """Add the gradients of all replicas' rows to `.grad`; the same bits on every replica.

        Call it after backward and before the optimizer steps.  Uses are processed in the order of backward; those that
        it did not reach are left out.
        """
        with torch.no_grad(), torch.autocast(self.transport.device.type, enabled=False):
            self._gather()
            self._awaited = 0
            for uses, pieces, work in self._packs:
                work.wait()
                sizes = [[use.rows[k] * width for use in uses for width in use.widths] for k in range(len(pieces))]
                parts = [iter(piece.split(own)) for piece, own in zip(pieces, sizes, strict=True)]
                for use in uses:
                    whole = [torch.cat([next(p) for p in parts]).view(sum(use.rows), width) for width in use.widths]
                    use.add_gradients(whole)
            self._packs = []

    def _arrived(self, is_last: bool, use: Callable[..., _Use], inputs: Tensor | None, error: Tensor) -> None:
        """Note the error of one use, and start to gather after the last."""
        factors = [each.reshape(-1, each.size(-1)) for each in (inputs, error) if each is not None]
        self._uses.append(use(factors, [factor.size(1) for factor in factors]))
        self._awaited -= 1
        if is_last and not self._awaited:
            self._gather()

    def _gather(self) -> None:
        """Start one gather for each dtype of the errors that have come."""
        packs: dict[torch.dtype, list[_Use]] = defaultdict(list)
        for use in self._uses:
            packs[use.factors[0].dtype].append(use)
        self._uses = []
        for uses in packs.values():
            sizes = [sum(use.rows[k] * sum(use.widths) for use in uses) for k in range(len(self.ranks))]
            pieces = uses[0].factors[0].new_empty(sum(sizes)).split(sizes)
            own = pieces[self.index]
            torch.cat([factor.reshape(-1) for use in uses for factor in use.factors], out=own)
            for use in uses:
                use.factors = ()
            self._packs.append((uses, pieces, self.transport.all_gather(list(pieces), own, self.ranks)))


@dataclass
class _Use:
    """One backward through one late-multiplied layer: its parameters, and the factors of their gradients.

    bias: None when it is not trained.  rows: of each replica.  factors: this rank's X (rows, in), where the weight is
    trained, and E (rows, out), until they are packed.  widths: their features.
    """

    weight: Tensor
    bias: Tensor | None
    rows: Sequence[int]
    factors: Sequence[Tensor]
    widths: Sequence[int]

    def add_gradients(self, factors: Sequence[Tensor]) -> None:
        """Multiply the factors of all replicas."""
        *inputs, errors = factors
        if inputs:
            add_to_grad(self.weight, errors.t() @ inputs[0].conj())
        if self.bias is not None:
            add_to_grad(self.bias, errors.sum(0, dtype=self.bias.dtype))


class _WatchError(torch.autograd.Function):
    """The identity on a linear layer's output; its backward notes the error before that goes on.

    A function and not a tensor hook: it also runs when `x` needs no gradient, later operations may change the output
    in place, and autograd detects an `x` that was changed in place after it was saved.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, anchor: Tensor, inputs: Tensor | None, arrived: Callable[[Tensor | None, Tensor], None]
    ) -> Tensor:
        ctx.arrived = arrived
        ctx.save_for_backward(inputs)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor | None, ...]:
        ctx.arrived(*ctx.saved_tensors, error)
        return error, None, None, None
