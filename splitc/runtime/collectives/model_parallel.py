"""Move values between the states of a group of ranks, and their gradients back.

A `Group` carries out the transitions of `layouts`: Krizhevsky's scheme for linear layers, whose collectives SplitBrain
calls modulo (batch to replicate) and shard (features to replicate) layers, Megatron's pair, and all others.

They differentiate once.  They are collective in forward and in backward: a backward that reaches one of them on one
member must reach it on all, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transport.base import CompletedWork, Transport, describe
from ..transport.formats import EXACT
from ..transport.messages import Arriving
from .deferred_gradients import DeferredGradients
from .layouts import Extents, Move, Transition


class Group:
    """One rank's communication within a group; in a group of one rank every operation is the identity.

    ranks: the members, sorted.  index: this rank's position among them.  size: the number of members.

    Raises ValueError when `ranks` do not hold this one.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        deferred: DeferredGradients | None = None,
        carrying: Callable[[str], Transport] | None = None,
    ) -> None:
        """deferred: what is computed while transitions travel.  carrying: gives the transport of a kind of payload."""
        self.ranks = tuple(ranks)
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not one of the group's ranks {self.ranks}")
        self.index = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.deferred = deferred or DeferredGradients()
        self.transport, self._carrying = transport, carrying or (lambda kind: transport)

    def transition(self, x: Tensor, transition: Transition, extents: Extents, kind: str = EXACT) -> Tensor:
        """`x` in another state; backward brings the gradient back to that of the first one's gradient.

        x: (..., N/k or N, ..., D or D/k), as its state says (`layouts`).  kind: of payload, see `Wire`; its gradients
        are "errors".
        Raises ValueError when the sizes of `x` do not fit.
        """
        if self.size == 1:
            return x
        moved: Tensor = _Transition.apply(x, self, transition, extents, kind)  # type: ignore[no-untyped-call]
        return moved

    def all_reduce_scalar(self, x: Tensor, maximum: bool = False) -> Tensor:
        """The sum of the members' `x`, or the largest, element by element, detached."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.transport.all_reduce(total, self.ranks, maximum=maximum).wait()
        return total

    def moved(self, x: Tensor, transition: Transition, extents: Extents, kind: str = EXACT) -> Tensor:
        """A value, or a gradient, in another state, without autograd."""
        moving = self.start(x, transition, extents, kind)
        if transition.move.communicates:
            self.deferred.one()
        return moving.wait()

    def start(self, x: Tensor, transition: Transition, extents: Extents, kind: str = EXACT) -> Arriving:
        """Start to bring a value, or a gradient, to another state, without autograd."""
        x, by = x.detach(), self._carrying(kind)
        if self.size == 1:
            return Arriving(CompletedWork(), lambda: x)
        dim, sizes = extents.sizes(transition.by_examples)
        match transition.move:
            case Move.GATHER:
                self._check(x, transition, dim, sizes)
                return self._gather(by, x, dim, sizes)
            case Move.EXCHANGE:
                self._check(x, transition, dim, sizes)
                other, others = extents.sizes(not transition.by_examples)
                self._check(x, transition, other, others, whole=True)
                return self._exchange(by, x, dim, sizes, other, others)
            case Move.SUM:
                total = x.clone(memory_format=torch.contiguous_format)
                return Arriving(by.all_reduce(total, self.ranks), lambda: total)
            case Move.SCATTER_SUM:
                self._check(x, transition, dim, sizes, whole=True)
                return self._scatter_sum(by, x, dim, sizes)
            case Move.SLICE:
                self._check(x, transition, dim, sizes, whole=True)
                return Arriving(CompletedWork(), lambda: x.narrow(dim, sum(sizes[: self.index]), sizes[self.index]))
            case Move.PAD:
                self._check(x, transition, dim, sizes)
                padded = x.new_zeros(_resized(x, dim, sum(sizes)))
                padded.narrow(dim, sum(sizes[: self.index]), sizes[self.index]).copy_(x)
                return Arriving(CompletedWork(), lambda: padded)
        return Arriving(CompletedWork(), lambda: x)

    # -- collectives of unequal pieces ---------------------------------------------------------------------------------

    def _gather(self, by: Transport, x: Tensor, dim: int, sizes: Sequence[int]) -> Arriving:
        """All-gather: the members' tensors, of these sizes along `dim`, concatenated; they arrive in one buffer."""
        shapes, shape = [_resized(x, dim, size) for size in sizes], _resized(x, dim, sum(sizes))
        flat = x.new_empty(math.prod(shape))
        pieces = [part.view(each) for part, each in zip(flat.split([*map(math.prod, shapes)]), shapes, strict=True)]
        work = by.all_gather(pieces, x, self.ranks)
        return Arriving(work, lambda: torch.cat(pieces, dim) if dim else flat.view(shape))

    def _scatter_sum(self, by: Transport, x: Tensor, dim: int, sizes: Sequence[int]) -> Arriving:
        """Reduce-scatter: this member's piece along `dim` of the sum of the members' tensors."""
        pieces = x.split(list(sizes), dim)
        own = x.new_empty(pieces[self.index].shape)
        return Arriving(by.reduce_scatter(own, pieces, self.ranks), lambda: own)

    def _exchange(
        self, by: Transport, x: Tensor, dim: int, sizes: Sequence[int], other: int, others: Sequence[int]
    ) -> Arriving:
        """All-to-all: the members' parts along `dim`, each cut along `other`, become parts along `other`."""
        pieces = [piece.contiguous() for piece in x.split(list(others), other)]
        received = [x.new_empty(_resized(pieces[self.index], dim, size)) for size in sizes]
        received[self.index] = pieces[self.index]
        peers = [(k, rank) for k, rank in enumerate(self.ranks) if k != self.index]
        sends, receives = ([(tensors[k], rank) for k, rank in peers] for tensors in (pieces, received))
        return Arriving(by.exchange(sends, receives, self.ranks), lambda: torch.cat(received, dim))

    def _check(self, x: Tensor, transition: Transition, dim: int, sizes: Sequence[int], whole: bool = False) -> None:
        """Raise ValueError when the members' sizes along `dim`, of which `x` has all or its own, do not fit."""
        if len(sizes) != self.size:
            raise ValueError(f"{transition} with sizes {list(sizes)} in a group of {self.size} ranks")
        if x.size(dim) != (expected := sum(sizes) if whole else sizes[self.index]):
            raise ValueError(
                f"{transition} of {describe(x)} on member {self.index}: by sizes {list(sizes)} dim {dim} should be "
                f"{expected}"
            )


class _Transition(torch.autograd.Function):
    """A transition; its adjoint is the transition of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, transition: Transition, extents: Extents, kind: str) -> Tensor:
        ctx.group, ctx.adjoint, ctx.extents = group, transition.adjoint, extents
        ctx.kind = EXACT if kind == EXACT else "errors"
        return group.moved(x, transition, extents, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.moved(grad, ctx.adjoint, ctx.extents, ctx.kind), None, None, None, None


def feature_widths(features: int, size: int) -> list[int]:
    """How many of `features` each of `size` members has; the first ones have one more where it does not divide."""
    small, extra = divmod(features, size)
    return [small + (k < extra) for k in range(size)]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
