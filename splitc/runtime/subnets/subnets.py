"""The subnet of a rank: slices of the dealt tensors in a round, shards of them between rounds (IST, algorithm 1).

The optimizer's state of a parameter goes with it.  All that one rank sends to another is one message of a dtype, and
nothing but values travels, since every rank knows the whole deal.  What the next slices need and no rank trains in this
round is sent while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.role import Role
from ..spec import DealtDims
from ..transport.base import Work
from .slices import Block, Places, Slices, numel_of, pick, store


class _Key(NamedTuple):
    """A dealt tensor: a parameter, or part of its optimizer's state."""

    name: str
    state: str = ""


Tensors = Mapping[_Key, Tensor]
Blocks = Callable[[_Key, int, int], Sequence[Block]]
"""The blocks of a tensor in the shard of one rank, its owner, and in the slice of another."""


class _Arriving(NamedTuple):
    """Messages on their way: from each rank, the values of some tensors.  blocks: where they go."""

    work: Work
    keys: list[_Key]
    buffers: dict[int, Tensor]
    blocks: Callable[[_Key, int], Sequence[Places]]


class Subnets:
    """The dealt tensors of a stage on one rank.

    dealt: tensor -> its dealt dims.
    owned: its shards, while the stage has slices.  ahead: what was fetched for the next round.
    """

    def __init__(self, role: Role, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        self._role, self._transport, self._stage = role, role.transport, stage
        self._ranks, self._own = role.spec.averaged, role.spec.averaged.index(role.transport.rank)
        self._dealt, self._dims = dealt, {name: role.spec.shards[name].dim for name in dealt}
        named = dict(stage.named_parameters(remove_duplicate=False))
        self._parameters = {name: named[name] for name in dealt if name in named}
        self.owned: dict[_Key, Tensor] = {}
        self._statistics: dict[str, Tensor] = {}
        self._slices = Slices({}, {}, 0, 0, 0)
        self.ahead: tuple[Slices, list[_Arriving]] | None = None

    def gather(self, seed: int, number: int) -> None:
        """Give the stage this rank's slices in round `number`; its shards are kept for the time after it."""
        before, (ahead, arriving) = self._slices, self.ahead or (None, [])
        if ahead is None or ahead.round != (seed, number):
            ahead, arriving = None, []
        new = self._slices = ahead or self._dealt_in(seed, number)
        owned = self.owned = self._held()
        slices = {key: t.new_empty(new.shape(key.name, t, self._own)) for key, t in owned.items()}
        fetched = {key for each in arriving for key in each.keys}

        def blocks(key: _Key, owner: int, rank: int) -> Sequence[Block]:
            return new.blocks(key.name, owner, rank, before if key in fetched else None)

        arriving = arriving + self._send(owned, blocks)
        for key, shard in owned.items():
            for block in new.blocks(key.name, self._own, self._own):
                store(slices[key], block.slice, pick(shard, block.shard))
        for each in arriving:
            self._receive(each, slices)
        self._hold(slices)
        self.ahead = None
        self._statistics = {name: self._stage.get_buffer(name) for name in self._dealt.keys() - self._parameters.keys()}
        for name, shard in self._statistics.items():  # of this rank's examples and neurons alone: nothing reads them
            _set_buffer(self._stage, name, shard.new_zeros(new.shape(name, shard, self._own)))

    def fetch_ahead(self, seed: int, number: int) -> None:
        """Start to gather what the slices of round `number` have that no rank trains in the present one."""
        new, now = self._dealt_in(seed, number), self._slices
        idle = partial(new.blocks, before=now, idle=True)
        self.ahead = new, self._send(self.owned, lambda key, owner, rank: idle(key.name, owner, rank))

    def give_back(self, share: float) -> None:
        """Return the slices to the ranks that own them, and give the stage its shards again.

        share: this rank's weight in the mean of what all ranks have, as a layer's inputs that are no neurons.
        """
        slices, owned, now = self._held(), self.owned, self._slices
        for each in self.ahead[1] if self.ahead else ():
            each.work.wait()
        for key, tensor in slices.items():
            if key not in owned:  # state that the optimizer made in this round: zero where nothing was trained
                owned[key] = torch.zeros_like(owned[_Key(key.name)], dtype=tensor.dtype)
            if common := now.common(key.name, self._own):
                at, dim = torch.tensor(common, device=tensor.device), self._dims[key.name]
                tensor.index_copy_(dim, at, tensor.index_select(dim, at) * share)
                owned[key].zero_()  # every row is added
        arriving = self._send(slices, lambda key, owner, rank: now.blocks(key.name, owner, rank), back=True)
        for key, tensor in slices.items():
            for block in now.blocks(key.name, self._own, self._own):
                store(owned[key], block.shard, pick(tensor, block.slice), add=bool(now.common(key.name, self._own)))
        for each in arriving:
            self._receive(each, owned, adds=True)
        self._hold(owned)
        for name, shard in self._statistics.items():
            _set_buffer(self._stage, name, shard)
        self.owned = {}

    # -- what the stage holds ------------------------------------------------------------------------------------------

    def _dealt_in(self, seed: int, number: int) -> Slices:
        return Slices(self._dealt, self._dims, len(self._ranks), seed, number)

    def _held(self) -> dict[_Key, Tensor]:
        """The dealt parameters of the stage, and the state of their optimizer that has their shape."""
        found = {}
        for name, parameter in self._parameters.items():
            found[_Key(name)] = parameter.data
            for state, value in sorted(self._role.optimizer_state(parameter).items(), key=lambda item: item[0]):
                if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    found[_Key(name, state)] = value
        return found

    def _hold(self, tensors: Tensors) -> None:
        """Let the stage and the optimizer have other tensors."""
        for key, tensor in tensors.items():
            parameter = self._parameters[key.name]
            if key.state:
                self._role.optimizer_state(parameter)[key.state] = tensor
            else:
                parameter.grad = None
                parameter.data = tensor

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _send(self, tensors: Tensors, blocks: Blocks, back: bool = False) -> list[_Arriving]:
        """Begin an all-to-all of blocks of tensors, one for each dtype: from shards to slices, or back."""

        def in_slice(key: _Key, k: int) -> list[Places]:
            return [block.slice for block in blocks(key, k, self._own)]

        def in_shard(key: _Key, k: int) -> list[Places]:
            return [block.shard for block in blocks(key, self._own, k)]

        outgoing, incoming = (in_slice, in_shard) if back else (in_shard, in_slice)
        others = [k for k in range(len(self._ranks)) if k != self._own]
        begun = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            keys = [key for key, tensor in tensors.items() if tensor.dtype == dtype]
            empty = tensors[keys[0]].new_empty(0)
            sent, buffers = {}, {}
            for k in others:
                sent[k] = torch.cat([empty, *(pick(tensors[key], at) for key in keys for at in outgoing(key, k))])
                buffers[k] = empty.new_empty(sum(numel_of(tensors[key], incoming(key, k)) for key in keys))
            sends, receives = ([(x, self._ranks[k]) for k, x in each.items()] for each in (sent, buffers))
            work = self._transport.exchange(sends, receives, self._ranks)
            begun.append(_Arriving(work, keys, buffers, incoming))
        return begun

    def _receive(self, arriving: _Arriving, tensors: Tensors, adds: bool = False) -> None:
        """Wait for blocks, and store them.  adds: to what ranks have in common, which is a sum."""
        arriving.work.wait()
        for rank, values in arriving.buffers.items():
            for key in arriving.keys:
                add = adds and bool(self._slices.common(key.name, self._own))
                for places in arriving.blocks(key, rank):
                    size = numel_of(tensors[key], [places])
                    store(tensors[key], places, values[:size], add)
                    values = values[size:]


def _set_buffer(stage: nn.Module, name: str, value: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(stage.get_submodule(path), attribute, value)
