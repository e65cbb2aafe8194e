"""Model parallelism within a group of ranks: gather and scatter features or examples.

A `Group` carries out Krizhevsky's scheme for linear layers, whose collectives SplitBrain calls modulo and shard layers:
the members work on the same examples, and each holds a shard of every weight.

    gather_examples     before the first sharded layer: every member gets all members' examples (modulo, forward)
    scatter_gradients   its adjoint: every member gets the gradient of its own examples (modulo, backward)
    gather_features     after a column-split layer: every member gets all features (shard)
    copy_to_group       before a column-split layer whose input all members already have
    reduce_from_group   after a row-split layer: the members' outputs are summed
    slice_examples      each member's own examples out of gathered ones
    gather_gradients    its adjoint

The caller says whether the members' gradients are summands (`partial`).  They are when the layers after the collective
are sharded; they are identical on all members when these layers are replicated.

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
    """One rank's communication within a group; in a group of one rank every operation is the identity.

    ranks: the members, sorted.  index: this rank's position among them.  size: the number of members.
    sent_bytes: payload bytes that this rank has sent: (n-1) times its own tensor for a gather, the pieces of the other
    members for a reduce-scatter, and 2 (n-1)/n of the tensor for an all-reduce, as on a ring.

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

        partial: backward is a reduce-scatter of the members' gradients; else it slices the gradient, which all members
        have, and sends nothing.
        """
        self._check("gather_features", x, widths, -1)
        if self.size == 1:
            return x
        whole: Tensor = _GatherFeatures.apply(x, self, tuple(widths), partial)  # type: ignore[no-untyped-call]
        return whole

    def copy_to_group(self, x: Tensor) -> Tensor:
        """`x`, equal on all members, as an input of sharded layers; backward all-reduces its gradient."""
        if self.size == 1:
            return x
        same: Tensor = _CopyToGroup.apply(x, self)  # type: ignore[no-untyped-call]
        return same

    def reduce_from_group(self, x: Tensor) -> Tensor:
        """The sum of the members' `x`; backward is the identity, since all members have the same gradient."""
        if self.size == 1:
            return x
        total: Tensor = _ReduceFromGroup.apply(x, self)  # type: ignore[no-untyped-call]
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
        """The examples of all members in rank order, detached; member i has `rows[i]` along `dim`."""
        self._check("gather_examples", x, rows, dim)
        return self._gather(x.detach(), rows, dim)

    def scatter_gradients(self, grad: Tensor, rows: Sequence[int], dim: int = 0, *, partial: bool) -> Tensor:
        """The gradient of this member's own examples, from that of the gathered ones: adjoint of `gather_examples`.

        partial: the members' gradients are summed; else all have the same one, and nothing is sent.
        """
        self._check("scatter_gradients", grad, rows, dim, whole=True)
        return self._scatter_sum(grad.detach(), rows, dim) if partial else self._slice(grad.detach(), rows, dim)

    def slice_examples(self, x: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
        """This member's own examples out of gathered ones, detached: a view."""
        self._check("slice_examples", x, rows, dim, whole=True)
        return self._slice(x.detach(), rows, dim)

    def gather_gradients(self, grad: Tensor, rows: Sequence[int], dim: int = 0) -> Tensor:
        """The gradient of gathered examples, from that of each member's own: adjoint of `slice_examples`."""
        self._check("gather_gradients", grad, rows, dim)
        return self._gather(grad.detach(), rows, dim)

    # -- collectives of unequal pieces ---------------------------------------------------------------------------------

    def _gather(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """All-gather: the members' tensors, of these sizes along `dim`, concatenated."""
        if self.size == 1:
            return x
        pieces = [x.new_empty(_resized(x, dim, size)) for size in sizes]
        self._transport.all_gather(pieces, x, self.ranks).wait()
        self.sent_bytes += (self.size - 1) * x.nbytes
        return torch.cat(pieces, dim)

    def _scatter_sum(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Reduce-scatter: this member's piece along `dim` of the sum of the members' tensors."""
        if self.size == 1:
            return x
        pieces = x.split(list(sizes), dim)
        own = x.new_empty(pieces[self.index].shape)
        self._transport.reduce_scatter(own, pieces, self.ranks).wait()
        self.sent_bytes += sum(piece.nbytes for i, piece in enumerate(pieces) if i != self.index)
        return own

    def _slice(self, x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
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
    """All-gather along the last dim; its adjoint is a reduce-scatter, or a slice where gradients are not partial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, widths: tuple[int, ...], partial: bool) -> Tensor:
        ctx.group, ctx.widths, ctx.partial = group, widths, partial
        return group._gather(x, widths, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        collect = ctx.group._scatter_sum if ctx.partial else ctx.group._slice
        return collect(grad, ctx.widths, -1), None, None, None


class _CopyToGroup(torch.autograd.Function):
    """The identity; its adjoint is an all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.all_reduce_scalar(grad), None


class _ReduceFromGroup(torch.autograd.Function):
    """An all-reduce; its adjoint is the identity, since all members have the same gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.all_reduce_scalar(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def feature_widths(features: int, size: int) -> list[int]:
    """How many of `features` each of `size` members has; the first ones have one more where it does not divide."""
    small, extra = divmod(features, size)
    return [small + (k < extra) for k in range(size)]


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
