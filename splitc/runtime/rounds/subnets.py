"""The subnet of a rank: slices of the dealt tensors in a round, shards of them between rounds (IST, algorithm 1).

Ranks own a dealt tensor in contiguous shards.  In a round each rank has the slice whose rows and columns are its
neurons, in the same order; the optimizer's state of a parameter goes with it.  All that one rank sends to another is
one message of a dtype, and nothing but values travels, since every rank knows the whole deal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..collectives.model_parallel import feature_widths
from ..spec import DealtDims, Shard
from ..transport.messages import Messages
from .deal import indices

State = Callable[[nn.Parameter], MutableMapping[str, Any]]
"""The optimizer's state of a parameter."""


class _Key(NamedTuple):
    """A dealt tensor: a parameter, or part of its optimizer's state."""

    name: str
    state: str = ""


class Subnets:
    """The dealt tensors of a stage on one rank.

    dealt: tensor -> its dealt dims.  shards: tensor -> the part that this rank owns.  ranks: those that share them.
    state: gives the optimizer's state of a parameter.
    """

    def __init__(
        self,
        messages: Messages,
        stage: nn.Module,
        dealt: Mapping[str, DealtDims],
        shards: Mapping[str, Shard],
        ranks: tuple[int, ...],
        state: State,
    ) -> None:
        self._messages, self._stage, self._state = messages, stage, state
        self._ranks, self._own = ranks, ranks.index(messages.transport.rank)
        self._dealt, self._dims = dealt, {name: shards[name].dim for name in dealt}
        named = dict(stage.named_parameters(remove_duplicate=False))
        self._parameters = {name: named[name] for name in dealt if name in named}
        self._owned: dict[_Key, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}
        self._indices: dict[str, list[dict[int, list[int]]]] = {}

    def gather(self, seed: int, number: int) -> None:
        """Give the stage this rank's slices in round `number`; its shards are kept for the time after it."""
        count = len(self._ranks)
        self._indices = {
            name: [{dim: indices(seed, number, runs, k, count) for dim, runs in dims.items()} for k in range(count)]
            for name, dims in self._dealt.items()
        }
        owned = self._owned = self._held()
        slices = {key: t.new_empty(self._shape(key, t, None, self._own)) for key, t in owned.items()}
        self._exchange(
            owned,
            give=lambda key, user: self._picked(key, owned[key], user),
            shape=lambda key, owner: self._shape(key, owned[key], owner, self._own),
            take=lambda key, owner, values: self._narrowed(key, slices[key], owner).copy_(values),
        )
        self._hold(slices)
        self._statistics = {name: self._stage.get_buffer(name) for name in self._dealt.keys() - self._parameters.keys()}
        for name, shard in self._statistics.items():  # of this rank's examples and neurons alone: nothing reads them
            _set_buffer(self._stage, name, shard.new_zeros(self._shape(_Key(name), shard, None, self._own)))

    def give_back(self, share: float) -> None:
        """Return the slices to the ranks that own them, and give the stage its shards again.

        share: this rank's weight in the mean of what all ranks have, as a layer's inputs that are no neurons.
        """
        slices, owned = self._held(), self._owned
        for key, tensor in slices.items():
            if key not in owned:  # state that the optimizer made in this round: zero where nothing was trained
                owned[key] = torch.zeros_like(owned[_Key(key.name)], dtype=tensor.dtype)
            if common := self._common(key):
                at, dim = torch.tensor(common, device=tensor.device), self._dims[key.name]
                tensor.index_copy_(dim, at, tensor.index_select(dim, at) * share)
                owned[key].zero_()  # every row is added
        self._exchange(
            slices,
            give=lambda key, owner: self._narrowed(key, slices[key], owner),
            shape=lambda key, user: self._shape(key, owned[key], self._own, user),
            take=lambda key, user, values: self._store(key, owned[key], user, values),
        )
        self._hold(owned)
        for name, shard in self._statistics.items():
            _set_buffer(self._stage, name, shard)
        self._owned = {}

    # -- what the stage holds ------------------------------------------------------------------------------------------

    def _held(self) -> dict[_Key, Tensor]:
        """The dealt parameters of the stage, and the state of their optimizer that has their shape."""
        found = {}
        for name, parameter in self._parameters.items():
            found[_Key(name)] = parameter.data
            for state, value in sorted(self._state(parameter).items(), key=lambda item: item[0]):
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    found[_Key(name, state)] = value
        return found

    def _hold(self, tensors: Mapping[_Key, Tensor]) -> None:
        """Let the stage and the optimizer have other tensors."""
        for key, tensor in tensors.items():
            parameter = self._parameters[key.name]
            if key.state:
                self._state(parameter)[key.state] = tensor
            else:
                parameter.grad = None
                parameter.data = tensor

    # -- parts of a tensor ---------------------------------------------------------------------------------------------

    def _span(self, key: _Key, owner: int, user: int) -> tuple[list[int], int, int, int]:
        """The indices of a slice along the owners' dim, where those of `owner` lie in it, and the owner's first row."""
        (first, last), found = self._rows(key)[owner], self._indices[key.name][user][self._dims[key.name]]
        return found, bisect_left(found, first), bisect_left(found, last), first

    def _rows(self, key: _Key) -> list[tuple[int, int]]:
        """The rows of each owner along the owners' dim."""
        total = sum(run.width for run in self._dealt[key.name][self._dims[key.name]])
        ends = list(accumulate(feature_widths(total, len(self._ranks)), initial=0))
        return list(pairwise(ends))

    def _shape(self, key: _Key, like: Tensor, owner: int | None, user: int) -> list[int]:
        """The shape of a slice, or of the part of it that `owner` owns."""
        shape = list(like.shape)
        for dim, found in self._indices[key.name][user].items():
            shape[dim] = len(found)
        if owner is not None:
            _, first, last, _ = self._span(key, owner, user)
            shape[self._dims[key.name]] = last - first
        return shape

    def _narrowed(self, key: _Key, tensor: Tensor, owner: int) -> Tensor:
        """The part of this rank's slice that `owner` owns, as a view."""
        _, first, last, _ = self._span(key, owner, self._own)
        return tensor.narrow(self._dims[key.name], first, last - first)

    def _at(self, key: _Key, user: int, device: torch.device) -> list[tuple[int, Tensor]]:
        """(dim, indices) of the part of a slice of `user` in this rank's shard, the owners' dim first."""
        own, (found, first, last, start) = self._dims[key.name], self._span(key, self._own, user)
        rows = torch.tensor(found[first:last], dtype=torch.long, device=device) - start
        others = [(dim, idx) for dim, idx in self._indices[key.name][user].items() if dim != own]
        return [(own, rows), *((dim, torch.tensor(idx, dtype=torch.long, device=device)) for dim, idx in others)]

    def _picked(self, key: _Key, shard: Tensor, user: int) -> Tensor:
        for dim, index in self._at(key, user, shard.device):
            shard = shard.index_select(dim, index)
        return shard

    def _store(self, key: _Key, shard: Tensor, user: int, values: Tensor) -> None:
        """Write the part of a user's slice into this rank's shard."""
        (own, rows), *others = self._at(key, user, shard.device)
        for dim, index in others:
            values = shard.index_select(own, rows).index_copy_(dim, index, values)
        if self._common(key):
            shard.index_add_(own, rows, values)
        else:
            shard.index_copy_(own, rows, values)

    def _common(self, key: _Key) -> list[int]:
        """Where this rank's slice of a tensor with one dealt dim has what all ranks have along it."""
        dims, dim = self._dealt[key.name], self._dims[key.name]
        dealt = [bool(layer) for layer, width in dims[dim] for _ in range(width)]
        return [k for k, i in enumerate(self._indices[key.name][self._own][dim]) if not dealt[i] and len(dims) == 1]

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _exchange(
        self,
        tensors: Mapping[_Key, Tensor],
        give: Callable[[_Key, int], Tensor],
        shape: Callable[[_Key, int], Sequence[int]],
        take: Callable[[_Key, int, Tensor], object],
    ) -> None:
        """An all-to-all: `give` each rank its part of every tensor, and `take` what it sends, of the given shape."""
        others = [k for k in range(len(self._ranks)) if k != self._own]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            keys = [key for key, tensor in tensors.items() if tensor.dtype == dtype]
            for key in keys:
                take(key, self._own, give(key, self._own))
            sent = {k: torch.cat([give(key, k).reshape(-1) for key in keys]) for k in others}
            sizes = {k: [prod(shape(key, k)) for key in keys] for k in others}
            arriving = {k: tensors[keys[0]].new_empty(sum(sizes[k])) for k in others}
            self._messages.transport.exchange(
                [(values, self._ranks[k]) for k, values in sent.items()],
                [(values, self._ranks[k]) for k, values in arriving.items()],
                self._ranks,
            ).wait()
            self._messages.count(sum(values.nbytes for values in sent.values()))
            for k, values in arriving.items():
                for key, part in zip(keys, values.split(sizes[k]), strict=True):
                    take(key, k, part.view(*shape(key, k)))


def _set_buffer(stage: nn.Module, name: str, value: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(stage.get_submodule(path), attribute, value)
