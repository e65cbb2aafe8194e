"""Where the slices of dealt tensors lie in the shards that ranks own, in one round (IST, appendix).

A slice has the rows and columns of a rank's neurons, in their order; an owner has a contiguous range along one dim.
What both have in common is a block, or several where a part of it is wanted: what no rank trains in another round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.model_parallel import feature_widths
from ..spec import DealtDims
from .deal import indices

Places = tuple[tuple[int, list[int]], ...]
"""Dims, and the indices of a block along each of them; all along other dims."""


class Block(NamedTuple):
    """The same block in a rank's slice and in an owner's shard."""

    slice: Places
    shard: Places


class Slices:
    """The slices of every rank in one round.

    dealt: tensor -> its dealt dims.  owners: tensor -> the dim along which ranks own it.  ranks: how many.
    """

    def __init__(
        self, dealt: Mapping[str, DealtDims], owners: Mapping[str, int], ranks: int, seed: int, number: int
    ) -> None:
        self.round = seed, number
        self._dealt, self._owners, self._ranks = dealt, owners, ranks
        self._indices = {
            name: [{dim: indices(seed, number, runs, k, ranks) for dim, runs in dims.items()} for k in range(ranks)]
            for name, dims in dealt.items()
        }
        self._blocks: dict[tuple[str, int, int, bool, bool], list[Block]] = {}
        self._sites: dict[tuple[str, int], dict[int, int | None]] = {}

    def shape(self, name: str, like: Tensor, rank: int) -> list[int]:
        """The shape of a rank's slice."""
        shape = list(like.shape)
        for dim, found in self._indices[name][rank].items():
            shape[dim] = len(found)
        return shape

    def common(self, name: str, rank: int) -> list[int]:
        """Where a rank's slice of a tensor with one dealt dim has what all ranks have along it."""
        dims = self._dealt[name]
        if len(dims) > 1:
            return []
        ((dim, runs),) = dims.items()
        dealt = [bool(layer) for layer, width in runs for _ in range(width)]
        return [k for k, i in enumerate(self._indices[name][rank][dim]) if not dealt[i]]

    def blocks(self, name: str, owner: int, rank: int, before: Slices | None = None, idle: bool = False) -> list[Block]:
        """The blocks of a rank's slice that `owner` owns.

        before: of an earlier round; then those that some rank trained in it, or, if `idle`, those that none did.
        """
        key = name, owner, rank, before is None, idle
        if key not in self._blocks:
            self._blocks[key] = list(self._found(name, owner, rank, before, idle))
        return self._blocks[key]

    def _found(self, name: str, owner: int, rank: int, before: Slices | None, idle: bool) -> Iterable[Block]:
        own, found = self._owners[name], self._indices[name][rank]
        total = sum(run.width for run in self._dealt[name][own])
        first, last = list(pairwise(accumulate(feature_widths(total, self._ranks), initial=0)))[owner]
        rows = range(bisect_left(found[own], first), bisect_left(found[own], last))
        for places in self._parted(name, found, rows, before, idle):
            if all(places.values()):
                shard = ((d, [found[d][k] - first * (d == own) for k in at]) for d, at in places.items())
                yield Block(tuple(places.items()), tuple(shard))

    def _parted(
        self, name: str, found: Mapping[int, list[int]], rows: range, before: Slices | None, idle: bool
    ) -> Iterable[dict[int, list[int]]]:
        """The wanted parts of the rows of a slice, as its positions along each dealt dim."""
        own = self._owners[name]
        others = {dim: list(range(len(at))) for dim, at in found.items() if dim != own}
        if before is None or not others:
            return [] if idle else [{own: list(rows), **others}]
        ((other, columns),) = others.items()
        sites, of_column = before._sites_of(name, own), before._sites_of(name, other)
        by_site: dict[int | None, list[int]] = {}
        for k in rows:
            by_site.setdefault(sites[found[own][k]], []).append(k)
        parts = []
        for site, some in by_site.items():
            trained = [None in (site, at) or at == site for at in (of_column[found[other][k]] for k in columns)]
            parts.append({own: some, other: [k for k in columns if trained[k] != idle]})
        return parts

    def _sites_of(self, name: str, dim: int) -> dict[int, int | None]:
        """Index along a dim -> the rank that has it; None: all have it."""
        if (name, dim) not in self._sites:
            sites = self._sites[name, dim] = {}
            for rank, found in enumerate(self._indices[name]):
                sites.update({i: None if i in sites else rank for i in found[dim]})
        return self._sites[name, dim]


def pick(tensor: Tensor, places: Places) -> Tensor:
    """A block of a tensor, flat."""
    for dim, at in places:
        tensor = tensor.index_select(dim, torch.tensor(at, device=tensor.device))
    return tensor.reshape(-1)


def store(tensor: Tensor, places: Places, values: Tensor, add: bool = False) -> None:
    """Overwrite a block of a tensor by flat values, or add them."""
    (dim, at), *others = places
    index = torch.tensor(at, device=tensor.device)
    values = values.view(shape_of(tensor, places))
    for other, found in others:
        values = tensor.index_select(dim, index).index_copy_(other, torch.tensor(found, device=tensor.device), values)
    (tensor.index_add_ if add else tensor.index_copy_)(dim, index, values)


def shape_of(tensor: Tensor, places: Places) -> list[int]:
    """The shape of a block."""
    sizes = {dim: len(at) for dim, at in places}
    return [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]


def numel_of(tensor: Tensor, blocks: Iterable[Places]) -> int:
    """Elements of blocks."""
    return sum(prod(shape_of(tensor, places)) for places in blocks)
