"""Dropout masks that depend on the examples and the layer, not on the rank that computes them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def mask(value: Tensor, p: float, feature_dims: int, key: tuple[object, ...]) -> Tensor:
    """A dropout mask for `value`: 0 with probability `p`, else 1 / (1 - p).

    feature_dims: 0 for one draw for each element; n for one draw for each index of the first n dims (dropout2d: 2).
    key: seed, step, layer, examples.  The same key gives the same mask on every rank with the same kind of device;
    other keys give independent masks.
    """
    shape = value.shape if not feature_dims else (*value.shape[:feature_dims], *[1] * (value.dim() - feature_dims))
    if p >= 1:
        return value.new_zeros(shape)
    generator = torch.Generator(value.device)
    generator.manual_seed(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big"))
    drawn = torch.empty(shape, dtype=value.dtype, device=value.device)
    return drawn.bernoulli_(1 - p, generator=generator).div_(1 - p)
