"""The formats in which numbers travel: the one table of them.

A further format is a row of `FORMATS`.  A message is the bytes of its numbers, behind the scale of each block of 128,
where its format has one.  Decoding gives the same bits on every rank.  What is no number stays none: infinities and
nans make no number of the block that they are in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EXACT = "exact"
BLOCK = 128
TINY = 1024
"""Bytes: smaller messages are sent as they are, since they take no less time in fewer bytes."""


@dataclass(frozen=True)
class Wire:
    """The format of each kind of payload: the name of one in `FORMATS`, or "exact", as computed.

    activations: values on their way forward.  errors: their gradients on the way back.  gradients: of weights, summed.
    averages: what units changed in a round.
    """

    activations: str = EXACT
    errors: str = EXACT
    gradients: str = EXACT
    averages: str = EXACT

    @property
    def is_exact(self) -> bool:
        """Whether all numbers travel as they are computed."""
        return set(astuple(self)) == {EXACT}

    @property
    def factors(self) -> str:
        """The format of activations and errors that travel together: the one that keeps more of a number."""
        return min(self.activations, self.errors, key=rounding)


AS_COMPUTED = Wire()


@dataclass(frozen=True)
class Format:
    """How numbers travel.

    size: bytes of a number.  scale: bytes of a block's scale.  encode: flat numbers, at least in float32, to bytes.
    decode: so many of them back, in float32.  traffic: bytes of memory that a number costs to encode, or to decode.
    rounding: relative error (L2) of a message of normal numbers.
    feeds_back: the sender adds what a sum of gradients, or of changes, lost of its own to the next one.
    """

    size: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]
    traffic: float
    rounding: float
    scale: int = 0
    feeds_back: bool = False

    def nbytes(self, numel: int) -> int:
        """Bytes of a message of so many numbers."""
        return numel * self.size + -(-numel // BLOCK) * self.scale

    def shortens(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether numbers of a dtype travel in it, if a message, or a collective in all, has so many."""
        whole = numel * dtype.itemsize
        return dtype.is_floating_point and whole >= TINY and self.nbytes(numel) < whole


def _cast(dtype: torch.dtype, rounding: float) -> Format:
    """Numbers in another dtype; what is too large for it becomes infinite, as in any computation."""

    def decode(data: Tensor, numel: int) -> Tensor:
        return data.view(dtype).float()

    return Format(dtype.itemsize, lambda flat: flat.to(dtype).view(torch.uint8), decode, 4 + dtype.itemsize, rounding)


def _scaled(dtype: torch.dtype, largest: float, rounding: float, traffic: float) -> Format:
    """Numbers of one byte in blocks, each with the float32 by which its largest number is the largest of the dtype."""

    def encode(flat: Tensor) -> Tensor:
        blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
        numbers = blocks / scales.where(scales != 0, 1.0)
        numbers = numbers.round_() if dtype is torch.int8 else numbers
        whole = numbers.to(dtype).view(torch.uint8).view(-1)[: flat.numel()]
        return torch.cat([scales.view(-1).view(torch.uint8), whole])

    def decode(data: Tensor, numel: int) -> Tensor:
        scales, numbers = data.split([data.numel() - numel, numel])
        blocks = F.pad(numbers, (0, -numel % BLOCK)).view(dtype).view(-1, BLOCK).float()
        return blocks.mul_(scales.clone().view(torch.float32).view(-1, 1)).view(-1)[:numel]  # a clone is aligned

    return Format(1, encode, decode, traffic, rounding, 4, True)


FORMATS = {
    "bf16": _cast(torch.bfloat16, 1.7e-3),
    "fp16": _cast(torch.float16, 2.1e-4),
    "int8": _scaled(torch.int8, 127.0, 1.6e-2, 50),
    "fp8": _scaled(torch.float8_e4m3fn, 448.0, 2.5e-2, 80),
}
"""Name -> format."""

NUMBERS = Format(4, lambda flat: flat.view(torch.uint8), lambda data, numel: data.view(torch.float32), 0.0, 0.0)
"""Float32 as computed, of sums that no backend makes."""


def rounding(name: str) -> float:
    """That of a format, by its name; 0 of numbers that travel as they are computed."""
    return FORMATS[name].rounding if name in FORMATS else 0.0


def format_of(name: str, dtype: torch.dtype, numel: int) -> Format | None:
    """The format in which so many numbers travel where one is asked for; None where they travel as they are."""
    found = FORMATS.get(name)
    return found if found is not None and found.shortens(dtype, numel) else None


def sum_format(name: str, dtype: torch.dtype, numel: int, unequal: bool) -> Format | None:
    """The format of a sum; None where the backend makes it.  unequal: the parts that ranks add up."""
    as_computed = unequal and name == EXACT and dtype is torch.float32 and numel * NUMBERS.size >= TINY
    return NUMBERS if as_computed else format_of(name, dtype, numel)
