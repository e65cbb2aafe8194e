"""All-reduce by recursive doubling, as Stanza sums gradients (section 4.1.2, equation 3).

With p the largest power of two that is at most n, the n - p surplus members first send their tensor to a partner, p
members exchange sums in log2(p) rounds with the member 1, 2, 4, ... positions away, and the partners send the result
back: floor(log2 n) + 2 rounds when n is not a power of two.  Stanza draws surplus members and partners at random; here
the last n - p members are surplus, and the first n - p their partners.

It sends few messages of the whole tensor: faster than a ring where latency dominates, slower where bandwidth does.  Two
members that exchange add the same two tensors, and addition commutes, so the result has the same bits on all members.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .base import CompletedWork, Ranks, Transport, Work

Rounds = Callable[[Transport, Tensor, Ranks], Iterator[Work]]

TAG = 2**31 - 4  # out of the way of programs' tags and the transport's own


def all_reduce(transport: Transport, tensor: Tensor, ranks: Ranks, rounds: Rounds | None = None) -> Work:
    """Start to replace `tensor` by its sum over `ranks`, a sorted tuple that holds this one.

    rounds: the messages of another way to sum, from rank to rank; each is waited for before the next is asked for.
    This rank's first message starts at once; rounds that depend on a received message run in `wait`.  Sums over the
    same ranks may be under way together, even when they are waited for in another order; before a sum over other ranks
    starts, those under way are completed.
    Raises ValueError when this rank is none of `ranks`.
    """
    if transport.rank not in ranks:
        raise ValueError(f"recursive doubling over {ranks} on rank {transport.rank}, which is not one of them")
    if len(ranks) == 1 or tensor.numel() == 0:
        return CompletedWork()
    return _Doubling(transport, tensor.detach(), ranks, rounds or _rounds)


def sent_bytes(nbytes: int, index: int, n: int) -> int:
    """Payload bytes that the member at position `index` of `n` sends to sum tensors of `nbytes`."""
    doublings = n.bit_length() - 1
    surplus = n - (1 << doublings)
    return nbytes if index >= 1 << doublings else nbytes * (doublings + (index < surplus))


class _Doubling:
    """One sum under way, as rounds: each starts when the one before is complete."""

    # The last sum that each transport has under way; it refers to the one before it.
    _last: ClassVar[WeakKeyDictionary[Transport, _Doubling]] = WeakKeyDictionary()

    def __init__(self, transport: Transport, tensor: Tensor, ranks: Ranks, rounds: Rounds) -> None:
        self._transport, self._ranks = transport, ranks
        self._before = self._last.get(transport)
        if self._before is not None and self._before._ranks != ranks:
            self._before.wait()
        self._rounds = rounds(transport, tensor, ranks)
        self._now: Work | None = next(self._rounds)
        self._last[transport] = self
        if transport.waits_hold_the_stream:  # all rounds can be issued, and in the program's order they must
            self.wait()

    def wait(self) -> None:
        if self._before is not None:
            self._before.wait()
            self._before = None
        while self._now is not None:
            self._now.wait()
            self._now = next(self._rounds, None)
        if self._last.get(self._transport) is self:
            del self._last[self._transport]


def _rounds(transport: Transport, tensor: Tensor, ranks: Ranks) -> Iterator[Work]:
    """The messages of this rank, round by round; a round's work must be complete before the next is asked for."""
    n, index = len(ranks), ranks.index(transport.rank)
    doublings = n.bit_length() - 1
    p = 1 << doublings
    if index >= p:
        partner = ranks[index - p]
        yield transport.exchange([(tensor, partner)], [], ranks, TAG)
        yield transport.exchange([], [(tensor, partner)], ranks, TAG)
        return
    other = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    if index < n - p:
        yield transport.exchange([], [(other, ranks[index + p])], ranks, TAG)
        tensor.add_(other)
    for k in range(doublings):
        peer = ranks[index ^ (1 << k)]
        yield transport.exchange([(tensor, peer)], [(other, peer)], ranks, TAG)
        tensor.add_(other)
    if index < n - p:
        yield transport.exchange([(tensor, ranks[index + p])], [], ranks, TAG)
