"""The counter-based generator: 32 random bits as a hash of a position inside an example and 64 bits of key.

A few rounds of multiply and xorshift in int32, which wraps on CPU and GPU alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1 - (1 << 32)  # odd, so that neighbours differ in all bits after a multiplication


class Layout(NamedTuple):
    """Where the examples of a tensor lie: along `dim`, with `rows` rows each; None: it has no examples.

    outer: the rows of an example lie apart, (outer, examples, rows / outer) flattened, as in sequences time first.
    columns: the first index of a shard of the last dim, and the size of the whole; None: the tensor has all of it.
    shape: of the tensor for one example; None: any.
    """

    dim: int | None = 0
    rows: int = 1
    outer: int = 1
    columns: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None

    def fits(self, shape: tuple[int, ...], examples: int | None) -> bool:
        """Whether a tensor of so many examples (None: of any number) may lie so."""
        sizes = (n * (examples or shape[d] // n) if d == self.dim else n for d, n in enumerate(self.shape or ()))
        if self.shape is None:
            return self.dim is None or self.dim < len(shape)
        return len(shape) == len(self.shape) and shape == tuple(sizes)


@dataclass(frozen=True)
class Grid:
    """Where draws lie: a tensor as (outer, count, inner) of `count` examples.

    shard: its size of the last dim, its first index there, and the size of the whole; None: it has all of it.
    """

    outer: int
    count: int
    inner: int
    shard: tuple[int, int, int] | None

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer, self.count, self.inner

    @classmethod
    def of(cls, shape: Sequence[int], layout: Layout) -> Grid:
        """The draws of a tensor."""
        dim, rows, apart, columns, _ = layout
        shard = (shape[-1], *columns) if columns else None
        if dim is None:
            return cls(1, 1, math.prod(shape), shard)
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        return cls(outer * apart, shape[dim] // rows, rows // apart * inner, shard)

    def keys(self, examples: Tensor, words: tuple[int, int]) -> list[Tensor]:
        """Two int32 numbers for each example.  examples: their indices in the global batch, int32.

        Raises ValueError where there are others than `count`.
        """
        if len(examples) != self.count:
            raise ValueError(f"random numbers for {self.count} examples, where the step has {len(examples)} here")
        keys = examples * GOLDEN
        keys = torch.stack([keys + word for word in words])
        _mix(_mix(keys, 16, 0x7FEB352D), 15, 0x846CA68B - (1 << 32))
        return [*keys.bitwise_xor_(logical_shift(keys, 16))]

    def words(self, keys: Sequence[Tensor]) -> Tensor:
        """A number for each draw."""
        return _hashed(self._positions(0, self.outer * self.inner, keys).view(self.outer, 1, self.inner), keys)

    def blocks(self, keys: Sequence[Tensor], size: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """The same, at most `size` at a time: where they are, and the numbers."""
        wide = max(1, min(self.inner, size))
        many = max(1, min(self.count, size // wide))
        apart = max(1, min(self.outer, size // (wide * many)))  # several only of whole examples, and of all of them
        for o, i in product(range(0, self.outer, apart), range(0, self.inner, wide)):
            outer, inner = slice(o, min(o + apart, self.outer)), slice(i, min(i + wide, self.inner))
            positions = self._positions(o * self.inner + i, (outer.stop - 1) * self.inner + inner.stop, keys)
            for c in range(0, self.count, many):
                examples = slice(c, c + many)
                found = _hashed(positions.view(outer.stop - o, 1, -1), [key[examples] for key in keys])
                yield (outer, examples, inner), found

    def _positions(self, first: int, last: int, keys: Sequence[Tensor]) -> Tensor:
        """Positions inside the example, int32."""
        found = torch.arange(first, last, dtype=torch.int32, device=keys[0].device)
        if self.shard is None:
            return found
        size, start, width = self.shard
        return found // size * width + found % size + start


def words_of(seed: int, step: int, label: tuple[int, ...], stream: int = 0, before: int = 0) -> tuple[int, int]:
    """Two int32 numbers that all examples of a draw have in common.  before: is added to the examples' indices."""
    digest = hashlib.blake2b(repr((seed, step, (label, stream))).encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "big") + before * GOLDEN + 2**31 for half in (digest[:4], digest[4:]))
    return first % 2**32 - 2**31, second % 2**32 - 2**31


def logical_shift(words: Tensor, shift: int) -> Tensor:
    """`words` shifted to the right, with zeros from the left."""
    return words.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)


def _hashed(positions: Tensor, keys: Sequence[Tensor]) -> Tensor:
    first, second = (key.view(1, -1, 1) for key in keys)
    found = positions.mul(GOLDEN) + first
    _mix(found, 15, 0x2C1B3C6D).bitwise_xor_(second)
    _mix(_mix(found, 16, 0x297A2D39), 15, 0x7FEB352D)
    return found.bitwise_xor_(logical_shift(found, 16))


def _mix(words: Tensor, shift: int, factor: int) -> Tensor:
    """One round, in place."""
    return words.bitwise_xor_(logical_shift(words, shift)).mul_(factor)
