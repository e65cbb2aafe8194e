"""Bags of one size that offsets divide: as rows of a matrix, which ranks can divide, and as the model takes them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import LaunchError

ONE_SIZE = (
    "Give bags as rows, (batch, most look-ups), to nn.EmbeddingBag(..., padding_idx=0), with 0 for those that are "
    "missing: ranks divide rows, and exchange those that they read of tables"
)
"""What to do about bags of unlike sizes."""

_KEY = re.compile(r"bag_(rows|starts|bounds)_(\d+)")
"""What a tensor is: look-ups, offsets, or offsets with the last one included; and how many look-ups a bag has."""


def divided(value: Tensor, key: str) -> Tensor | None:
    """Of look-ups (..., bags * size) rows, (..., bags, size); of offsets no numbers, (..., bags, 0); else None.

    Raises LaunchError where bags are of other sizes.
    """
    if (found := _KEY.fullmatch(key)) is None:
        return None
    kind, size, length = found[1], int(found[2]), value.shape[-1]
    made = value.new_empty(*value.shape[:-1], max(length - (kind == "bounds"), 0), 0)
    if length % size if kind == "rows" else not torch.equal(value, _offsets(made, kind, size)):
        raise LaunchError(f"every bag of the example has {size} look-ups, and this batch has others. {ONE_SIZE}")
    return value.unflatten(-1, (length // size, size)) if kind == "rows" else made


def whole(value: Tensor, key: str) -> Tensor | None:
    """What `divided` made this of; None of other values."""
    if (found := _KEY.fullmatch(key)) is None or not isinstance(value, Tensor):
        return None
    return value.flatten(-2) if found[1] == "rows" else _offsets(value, found[1], int(found[2]))


def _offsets(like: Tensor, kind: str, size: int) -> Tensor:
    """Where bags of one size begin.  like: (..., bags, 0)."""
    starts = torch.arange(like.size(-2) + (kind == "bounds"), dtype=like.dtype, device=like.device) * size
    return starts.expand(*like.shape[:-2], -1)


def are_divided(given: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether offsets among tensors, with their keys, are what `divided` makes of them."""
    return any(_KEY.fullmatch(key) and value.dim() > 1 and value.shape[-1] == 0 for key, value in given)
