"""What ranks that share the layers of one model do together: gather and scatter features, or examples.

A `Group` carries what Krizhevsky's scheme for linear layers needs, which SplitBrain calls modulo and shard layers: the
members work on the same examples, and each holds a part of every weight.

    gather_examples   before the first sharded layer: every member gets the examples of all (modulo layer, forward)
    gather_features   after a column-split layer: every member gets all features (shard layer)
    enter             before a column-split layer whose input all members already have
    reduce_from_group      after a row-split layer: its outputs are parts of a sum
    return_examples   the gradients of a member's own examples go back to it (modulo layer, backward)

Whether the members' gradients are parts of a sum (`partial`) is what the caller must know: they are when each member
went on with a part of the work from there, and are the whole gradient, alike on all, when all did the same.

Those with gradients differentiate once.  They are collective in forward and in backward: a backward that reaches one
of them on one member must reach it on all, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..transport.base import Transport, describe


class Group:
    """This rank's side of a group; a group of one rank passes everything through.

    ranks: the members, sorted.  index: this rank's position among them.  size: how many they are.
    sent_bytes: payload this rank has sent for the group, by definition: (n-1) times its own part for a gather, the
    parts of the others for a scatter, and 2 (n-1)/n of the tensor for a sum, as on a ring.

    Raises ValueError when `ranks` do not hold this one.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        if transport.rank not in self.ranks:
            raise ValueError(f"rank {transport.rank} is not one of the group's ranks {self.ranks}")
        self.index = self.ranks.index(transport.rank)
        self.size = len(self.ranks)
        self.sent_bytes = 0
        self._transport = transport

    # -- with gradients ------------------------------------------------------------------------------------------------

    def gather_features(self, x: Tensor, widths: Sequence[int], partial: bool) -> Tensor:
        """The whole (..., sum(widths)) of which `x` is this member's slice, (..., widths[index]).

        partial: the gradients are parts of a sum, and each member gets the sum of its slices; else its own slice of
        the one gradient that all members have, and nothing is sent.
        """
        self._check("gather_features", x, widths, -1)
        if self.size == 1:
            return x
        whole: Tensor = _GatherFeatures.apply(x, self, tuple(widths), partial)  # type: ignore[no-untyped-call]
        return whole

    def copy_to_group(self, x: Tensor) -> Tensor:
        """`x`, alike on all members, as an input of sharded layers: its gradients are summed over the group."""
        if self.size == 1:
            return x
        same: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return same

    def reduce_from_group(self, x: Tensor) -> Tensor:
        """The sum of the members' `x`; the gradient, alike on all members, goes to each of them."""
        if self.size == 1:
            return x
        total: Tensor = _SumPartials.apply(x, self)  # type: ignore[no-untyped-call]
        return total

    # -- without gradients ---------------------------------------------------------------------------------------------

    def all_reduce_scalar(self, x: Tensor) -> Tensor:
        """The sum of the members' `x`, detached."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self._transport.all_reduce(total, self.ranks).wait()
            self.sent_bytes += 2 * (self.size - 1) * total.nbytes // self.size
        return total

    def gather_examples(self, x: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
        """The examples of all members in their order, detached; member i gives `rows[i]` along `dim`."""
        self._check("gather_examples", x, rows, dim)
        return self._gather(x.detach(), rows, dim)

    def return_examples(self, grad: Tensor, rows: Sequence[int], dim: int = 0, *, partial: bool) -> Tensor:
        """The gradient of this member's own examples, from that of the gathered ones: the adjoint of the gather.

        partial: what the members have are parts of a sum; else all have the same, and nothing is sent.
        """
        self._check("return_examples", grad, rows, dim, whole=True)
        return self._scatter_sum(grad.detach(), rows, dim) if partial else self._own(grad.detach(), rows, dim)

    def keep_own(self, x: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
        """This member's own examples of gathered ones, detached: a view, nothing is sent."""
        self._check("keep_own", x, rows, dim, whole=True)
        return self._own(x.detach(), rows, dim)

    def spread_gradients(self, grad: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
        """The gradient of gathered examples of which each member kept its own: the adjoint of `keep_own`."""
        self._check("spread_gradients", grad, rows, dim)
        return self._gather(grad.detach(), rows, dim)

    # -- what they are made of -----------------------------------------------------------------------------------------

    def _gather(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """The members' tensors, of these sizes along `dim`, one after the other."""
        if self.size == 1:
            return x
        pieces = [x.new_empty(_resized(x, dim, size)) for size in sizes]
        self._transport.all_gather(pieces, x, self.ranks).wait()
        self.sent_bytes += (self.size - 1) * x.nbytes
        return torch.cat(pieces, dim)

    def _scatter_sum(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """This member's part along `dim` of the sum of the members' tensors."""
        if self.size == 1:
            return x
        pieces = x.split(list(sizes), dim)
        own = x.new_empty(pieces[self.index].shape)
        self._transport.reduce_scatter(own, pieces, self.ranks).wait()
        self.sent_bytes += sum(piece.nbytes for i, piece in enumerate(pieces) if i != self.index)
        return own

    def _own(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        return x.narrow(dim, sum(sizes[: self.index]), sizes[self.index])

    def _check(self, what: str, x: Tensor, sizes: Sequence[int], dim: int, whole: bool = False) -> None:
        """Raise ValueError when the members' sizes along `dim` do not fit the group or `x`."""
        if len(sizes) != self.size:
            raise ValueError(f"{what} with sizes {list(sizes)} in a group of {self.size} ranks")
        expected = sum(sizes) if whole else sizes[self.index]
        if x.size(dim) != expected:
            raise ValueError(
                f"{what} of {describe(x)} on member {self.index}: by sizes {list(sizes)} dim {dim} should be {expected}"
            )


class _GatherFeatures(torch.autograd.Function):
    """All-gather along the last dim; its adjoint is reduce-scatter, or the own slice where gradients are whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: tuple[int, ...], partial: bool) -> Tensor:
        ctx.group, ctx.widths, ctx.partial = group, widths, partial
        return group._gather(x, widths, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        collect = ctx.group._scatter_sum if ctx.partial else ctx.group._own
        return collect(grad, ctx.widths, -1), None, None, None


class _Enter(torch.autograd.Function):
    """The identity; its adjoint is the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_reduce_scalar(grad), None


class _SumPartials(torch.autograd.Function):
    """The sum, of which all members have the same gradient; its adjoint is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce_scalar(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
