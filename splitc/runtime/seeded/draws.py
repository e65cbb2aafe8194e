"""Random numbers as a function of seed, step, call, example and position inside the example: a counter-based generator.

Every rank draws the numbers of its own examples and features, and they are those that one process draws for them.  A
number is a hash of 32 bits: a few rounds of multiply and xorshift in int32, which wraps on CPU and GPU alike, over the
position and 64 bits of key for each example.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Label = tuple[int, ...]
"""Which draw of the step: the ordinal of the call in forward and loss; inside a region, the region's and its own."""

_GOLDEN = 0x9E3779B1 - (1 << 32)  # odd, so that neighbours differ in all bits after a multiplication


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
class Draws:
    """The random numbers of one step on some examples.

    examples: intervals of the global batch, whose rows the tensors hold in this order.  None: every example draws the
    numbers of the first one, so that examples stay exchangeable.
    """

    seed: int
    step: int
    examples: Sequence[tuple[int, int]] | None

    def mask(self, value: Tensor, p: float, label: Label, layout: Layout, feature_dims: int = 0) -> Tensor:
        """A dropout mask for `value`: 0 with probability `p` (exact to 2^-32), else 1 / (1 - p).

        feature_dims: 0 for one draw for each element; n for one draw for each index of the first n dims (dropout2d: 2).
        """
        shape = value.shape
        if 0 < feature_dims < value.dim():
            shape = torch.Size((*shape[:feature_dims], *[1] * (value.dim() - feature_dims)))
            layout = Layout(None) if layout.dim is None or layout.dim >= feature_dims else layout._replace(columns=None)
        if p >= 1:
            return value.new_zeros(shape)
        threshold = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
        return (self.words(shape, value.device, label, layout) < threshold).to(value.dtype).div_(1 - p)

    def uniform(self, like: Tensor, label: Label, layout: Layout) -> Tensor:
        """Numbers in [0, 1) with the shape and dtype of `like`: multiples of 2^-24 in float32, of 2^-32 in float64."""
        digits = min(1 - round(math.log2(torch.finfo(like.dtype).eps)), 32)
        words = self.words(like.shape, like.device, label, layout)
        leading = words.long().bitwise_and_(2**32 - 1) if digits == 32 else _logical_shift(words, 32 - digits)
        return leading.to(like.dtype).mul_(2.0**-digits)

    def normal(self, like: Tensor, label: Label, layout: Layout) -> Tensor:
        """Numbers of the standard normal distribution by Box and Muller, up to the last digits the same anywhere."""
        radius, angle = (
            self.words(like.shape, like.device, label, layout, stream).double().add_(2**31 + 0.5).mul_(2.0**-32)
            for stream in (0, 1)
        )
        return radius.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_()).to(like.dtype)

    def words(self, shape: torch.Size, device: torch.device, label: Label, layout: Layout, stream: int = 0) -> Tensor:
        """Uniform int32 numbers; another `stream` gives numbers that are independent."""
        dim, rows, apart, columns, _ = layout
        outer, count, inner = 1, 1, shape.numel()
        if dim is not None:
            outer, count = shape[:dim].numel() * apart, shape[dim] // rows
            inner = rows // apart * shape[dim + 1 :].numel()
        with torch.no_grad():
            first, second = self._keys(count, dim is not None, device, (label, stream))
            inside = torch.arange(outer * inner, dtype=torch.int32, device=device)
            if columns is not None:
                start, width = columns
                inside = inside // shape[-1] * width + inside % shape[-1] + start
            found = inside.mul_(_GOLDEN).view(outer, 1, inner) + first.view(1, count, 1)
            _mix(found, 15, 0x2C1B3C6D).bitwise_xor_(second.view(1, count, 1))
            _mix(_mix(found, 16, 0x297A2D39), 15, 0x7FEB352D)
            return found.bitwise_xor_(_logical_shift(found, 16)).view(shape)

    def _keys(self, count: int, by_example: bool, device: torch.device, what: object) -> list[Tensor]:
        """Two numbers for each example; one pair where there are no examples."""
        text = repr((self.seed, self.step, what)).encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        index = torch.zeros(count, dtype=torch.int32, device=device)
        if by_example and self.examples is not None:
            parts = [torch.arange(a, b, dtype=torch.int32, device=device) for a, b in self.examples]
            index = torch.cat([index[:0], *parts])
            if len(index) != count:
                raise ValueError(f"random numbers for {count} examples, where the step has {len(index)} here")
        keys = []
        for half in (digest[:4], digest[4:]):
            key = index * _GOLDEN + int.from_bytes(half, "big", signed=True)
            _mix(_mix(key, 16, 0x7FEB352D), 15, 0x846CA68B - (1 << 32))
            keys.append(key.bitwise_xor_(_logical_shift(key, 16)))
        return keys


def _mix(words: Tensor, shift: int, factor: int) -> Tensor:
    """One round, in place."""
    return words.bitwise_xor_(_logical_shift(words, shift)).mul_(factor)


def _logical_shift(words: Tensor, shift: int) -> Tensor:
    """`words` shifted to the right, with zeros from the left."""
    return words.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
