"""A rank's access to the others on which numbers travel in a short format; all else is as on the transport inside.

Sums are made in float32: each rank gets its slice of all others' numbers, adds them, and sends the sum to all.  So the
error of a sum does not grow with the ranks, as it would on a ring.  What several ranks have in the end has the same
bits on all of them, also on the one that made it.  A rank on a slow line may have a smaller slice than others
(`sum_parts`), or none; then sums of numbers as computed are made so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from . import doubling
from .base import AllOf, Message, Ranks, Transport, Work
from .collective import are_unequal, sum_parts
from .formats import FORMATS, NUMBERS, Format, sum_format
from .recorder import Forwarding

_SCATTER_TAG, _SUMS_TAG = 2**31 - 5, 2**31 - 6  # out of the way of programs' tags, and of other collectives'


class Short(Forwarding):
    """A transport in a format, by its name, or "exact".  What it sends is counted by the one inside.

    shares: rank -> its part of what is summed; none where they are equal.
    residuals: of each sum that has a name, what the last one lost of this rank's own numbers, and in its slice of the
    sum.  It is added to the next one, so that over the steps nothing is lost (error feedback).
    """

    def __init__(self, inner: Transport, name: str, shares: Sequence[int] = ()) -> None:
        super().__init__(inner)
        self.format, self.residuals = FORMATS.get(name, NUMBERS), dict[str, Tensor]()
        self._name, self._shares = name, shares

    def summed(self, tensor: Tensor, ranks: Ranks, name: str) -> Work:
        """Start to replace `tensor` by its sum, as `all_reduce` does, with the residual of that name."""
        return self._all_reduce(tensor, ranks, name=name) if len(ranks) > 1 else self.all_reduce(tensor, ranks)

    def leaving(self, part: Tensor, residual: Tensor | None) -> Tensor:
        """The bytes of numbers and of what is left of those before; what these bytes lose is the residual."""
        if residual is None:
            return encoded(self.format, part)
        data = encoded(self.format, residual.add_(part))
        residual.sub_(decoded(self.format, data, residual)).nan_to_num_(0.0, 0.0, 0.0)  # nothing of what overflows
        return data

    def residual(self, name: str, like: Tensor) -> Tensor | None:
        """That of a name, flat, at first zeros; None where the format has none."""
        if not (name and self.format.feeds_back):
            return None
        if name not in self.residuals or self.residuals[name].numel() != like.numel():
            self.residuals[name] = like.new_zeros(like.numel(), dtype=_summed_in(like))
        return self.residuals[name]

    def _check_group(self, what: str, ranks: Ranks) -> None:
        return  # the transport inside does

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._inner.isend(self._leaving(tensor), dst, tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        data = self._arriving(tensor)
        return AllOf([self._inner.irecv(data, src, tag)], partial(self._fill, tensor, data))

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, tag: int) -> Work:
        leaving = [(self._leaving(x), dst) for x, dst in sends]
        arriving = [(self._arriving(x), src) for x, src in receives]
        fill = [partial(self._fill, x, data) for (x, _), (data, _) in zip(receives, arriving, strict=True)]
        return AllOf([self._inner.exchange(leaving, arriving, ranks, tag)], *fill)

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, maximum: bool = False, name: str = "") -> Work:
        form = sum_format(self._name, tensor.dtype, tensor.numel(), are_unequal(ranks, self._shares))
        if maximum or form is None:
            return self._inner.all_reduce(tensor, ranks, maximum)
        return doubling.all_reduce(self._inner, tensor, ranks, partial(self._halves, name))

    def _broadcast(self, tensor: Tensor, src: int, ranks: Ranks) -> Work:
        return self._inner.broadcast(tensor, src, ranks)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: Ranks) -> Work:
        if not self.format.shortens(tensor.dtype, sum(output.numel() for output in outputs)):
            return self._inner.all_gather(outputs, tensor, ranks)
        return self._gathered(outputs, encoded(self.format, tensor), ranks)

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: Ranks) -> Work:
        if not self.format.shortens(output.dtype, sum(piece.numel() for piece in pieces)):
            return self._inner.reduce_scatter(output, pieces, ranks)
        own = pieces[ranks.index(self.rank)]
        data = {rank: encoded(self.format, x) for rank, x in zip(ranks, pieces, strict=True) if rank != self.rank}
        work, summed = self._scattered(data, own.reshape(-1), ranks, _SCATTER_TAG)
        return AllOf([work], lambda: output.detach().copy_(summed().view(output.shape)))

    def _halves(self, name: str, transport: Transport, tensor: Tensor, ranks: Ranks) -> Iterator[Work]:
        """Those of an all-reduce: to each rank its slice of all numbers, and the sums to all.

        Sums are awaited from the beginning: what tells gloo's sender so would queue behind the numbers that leave.
        """
        index, residual, first = ranks.index(self.rank), self.residual(name, tensor), 0
        pieces, under_way = [], list[Work]()
        for sizes in sum_parts(tensor.numel(), ranks, self._shares):
            piece = slice(first, first := first + sum(sizes))
            parts = tensor.view(-1)[piece].split(sizes)
            lost = [None] * len(ranks) if residual is None else residual[piece].split(sizes)
            sums = [self._empty(part) for part in parts]
            coming = [(sums[k], rank) for k, rank in enumerate(ranks) if k != index]
            if not self.waits_hold_the_stream:  # else nothing may be issued behind what waits
                under_way.append(self._inner.exchange([], coming, ranks, _SUMS_TAG))
                coming = []
            data = {rank: self.leaving(parts[k], lost[k]) for k, rank in enumerate(ranks) if k != index}
            numbers, summed = self._scattered(data, parts[index], ranks, doubling.TAG)
            pieces.append((parts, lost[index], sums, coming, numbers, summed))
        for _, residual, sums, coming, numbers, summed in pieces:
            yield numbers
            sums[index] = self.leaving(summed(), residual)
            going = [(sums[index], rank) for rank in ranks if rank != self.rank]
            under_way.append(self._inner.exchange(going, coming, ranks, _SUMS_TAG))
        fill = [partial(self._fill, *each) for parts, _, sums, *_ in pieces for each in zip(parts, sums, strict=True)]
        yield AllOf(under_way, *fill)

    def _scattered(
        self, data: dict[int, Tensor], own: Tensor, ranks: Ranks, tag: int
    ) -> tuple[Work, Callable[[], Tensor]]:
        """Start to send each rank its data; and what sums those that come, in rank order, with this rank's own."""
        arriving = {rank: self._empty(own) for rank in data}

        def summed() -> Tensor:
            every = (
                decoded(self.format, arriving[r], own) if r in arriving else own.to(_summed_in(own)) for r in ranks
            )
            return reduce(torch.add, every)

        leaving, coming = ([(x, rank) for rank, x in each.items()] for each in (data, arriving))
        return self._inner.exchange(leaving, coming, ranks, tag), summed

    def _gathered(self, outputs: Sequence[Tensor], own: Tensor, ranks: Ranks) -> Work:
        """Start to fill `outputs` with what each rank has encoded."""
        sizes = [self.format.nbytes(output.numel()) for output in outputs]
        data = own.new_empty(sum(sizes)).split(sizes)
        fill = [partial(self._fill, *each) for each in zip(outputs, data, strict=True)]
        return AllOf([self._inner.all_gather([*data], own, ranks)], *fill)

    def _leaving(self, tensor: Tensor) -> Tensor:
        return encoded(self.format, tensor) if self.format.shortens(tensor.dtype, tensor.numel()) else tensor

    def _arriving(self, tensor: Tensor) -> Tensor:
        """What a message is received in: the tensor itself, if it travels as it is."""
        return self._empty(tensor) if self.format.shortens(tensor.dtype, tensor.numel()) else tensor

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty(self.format.nbytes(like.numel()), dtype=torch.uint8, device=like.device)

    def _fill(self, tensor: Tensor, data: Tensor) -> None:
        if data is not tensor:
            tensor.detach().copy_(decoded(self.format, data, tensor).view(tensor.shape))


def encoded(form: Format, tensor: Tensor) -> Tensor:
    """The bytes of a tensor's numbers."""
    return form.encode(tensor.detach().reshape(-1).to(_summed_in(tensor)))


def decoded(form: Format, data: Tensor, like: Tensor) -> Tensor:
    """As many numbers as a tensor has, flat, of its bytes."""
    return form.decode(data, like.numel()).to(_summed_in(like))


def _summed_in(tensor: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(tensor.dtype, torch.float32)
