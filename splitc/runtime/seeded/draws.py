"""Random numbers as a function of seed, step, call, example and position inside the example.

Every rank draws the numbers of its own examples and features, and they are those that one process draws for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..pieces import indices
from .kernels import dropout
from .words import Grid, logical_shift, words_of
from .words import Layout as Layout

Label = tuple[int, ...]
"""Which draw of the step: the ordinal of the call in forward and loss; inside a region, the region's and its own."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one step on some examples.

    examples: intervals of the global batch, whose rows the tensors hold in this order.  None: every example draws the
    numbers of the first one, so that examples stay exchangeable.
    """

    seed: int
    step: int
    examples: Sequence[tuple[int, int]] | None

    def dropout(self, value: Tensor, p: float, label: Label, layout: Layout, feature_dims: int = 0) -> Tensor:
        """`value` after dropout with probability `p`; feature_dims: see `kernels.dropout`.

        A product, which torch derives forward and backward, and under torch.func and vmap.
        """
        numbers = torch.tensor((self.seed, self.step, 0), device="cpu")
        found = None if self.examples is None else indices(self.examples, value.device)
        ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
        return value * dropout(ones, p, numbers, found, label, layout, feature_dims)

    def uniform(self, like: Tensor, label: Label, layout: Layout) -> Tensor:
        """Numbers in [0, 1) with the shape and dtype of `like`: multiples of 2^-24 in float32, of 2^-32 in float64."""
        digits = min(1 - round(math.log2(torch.finfo(like.dtype).eps)), 32)
        words = self.words(like.shape, like.device, label, layout)
        leading = words.long().bitwise_and_(2**32 - 1) if digits == 32 else logical_shift(words, 32 - digits)
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
        grid = Grid.of(shape, layout)
        with torch.no_grad():
            examples = torch.zeros(grid.count, dtype=torch.int32, device=device)
            if layout.dim is not None and self.examples is not None:
                examples = indices(self.examples, device)
            words = words_of(self.seed, self.step, label, stream)
            return grid.words(grid.keys(examples, words)).view(shape)
