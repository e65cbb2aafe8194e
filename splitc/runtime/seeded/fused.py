"""Dropout as one kernel of Triton; imported only where Triton is.

A program has a tile of rows, each inside one example, whose keys serve all draws of the row.  The hash is that of
`words`, in uint32.  Memory is read and written in its order, also where channels are last.
"""

from __future__ import annotations

import struct
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from .words import Grid

triton: Any = resolve_name("triton")
tl: Any = resolve_name("triton.language")
_TILE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _mix(words, shift: tl.constexpr, factor: tl.constexpr):  # type: ignore[no-untyped-def]
    return (words ^ (words >> shift)) * factor


@triton.jit
def _key(example, word):  # type: ignore[no-untyped-def]
    key = _mix(_mix(example * 0x9E3779B1 + word.to(tl.uint32), 16, 0x7FEB352D), 15, 0x846CA68B)
    return key ^ (key >> 16)


@triton.jit(do_not_specialize=["first", "second", "threshold", "scale"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    value, out, mask, examples, first, second, threshold, scale, count, inner, lines, length, group, channels, area,
    size, start, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr, SHARD: tl.constexpr,
    WORKS: tl.constexpr,
):  # fmt: skip
    """lines, length: rows of the value, and their elements.  LAST: channels are.  WORKS: the dtype that multiplies."""
    across = (length + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < lines) & (at < length)
    element = at
    if LAST:
        inside = at % (channels * area)
        element = at - inside + inside % channels * area + inside // channels
    position = row // count * inner + element // group
    if SHARD:
        position = position // size * width + position % size + start
    example = tl.load(examples + row % count, mask=row < lines, other=0).to(tl.uint32)
    words = position.to(tl.uint32) * 0x9E3779B1 + _key(example, first)
    words = _mix(words, 15, 0x2C1B3C6D) ^ _key(example, second)
    words = _mix(_mix(words, 16, 0x297A2D39), 15, 0x7FEB352D)
    kept = (words ^ (words >> 16)).to(tl.int32, bitcast=True) < threshold
    factor = tl.where(kept, scale.to(tl.float64, bitcast=True).to(WORKS), 0.0)
    found = tl.load(value + row * length + at, mask=there).to(WORKS) * factor
    tl.store(out + row * length + at, found.to(out.dtype.element_ty), mask=there)
    draw = row * length + at if group == 1 else row * inner + element // group
    tl.store(mask + draw, kept.to(tl.uint8), mask=there & (element % group == 0))


def dropout(
    value: Tensor,
    out: Tensor,
    mask: Tensor,
    examples: Tensor,
    words: tuple[int, int],
    threshold: int,
    scale: float,
    grid: Grid,
) -> None:
    """Fill `out` and `mask`, which lie in memory as the value does; a mask for whole channels is contiguous.

    examples, words: see `Grid.keys`.  A draw below `threshold` is kept, and multiplied by `scale`.
    """
    group = value.numel() // mask.numel()
    lines, length = grid.outer * grid.count, grid.inner * group
    channels, area = (value.shape[1], value[0, 0].numel()) if value.dim() > 3 else (1, 1)
    last = not value.is_contiguous()
    if last and (length % (channels * area) or not _channels_last(value)):
        made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        drawn = torch.empty(mask.shape, dtype=torch.bool, device=value.device)
        dropout(value.contiguous(), made, drawn, examples, words, threshold, scale, grid)
        out.copy_(made)
        mask.copy_(drawn)
        return
    columns = min(triton.next_power_of_2(length), _TILE)
    rows = _TILE // columns
    programs = -(-lines // rows) * -(-length // columns)
    bits = int.from_bytes(struct.pack("<d", scale), "little")
    works = tl.float64 if value.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(value):
        _kernel[programs,](
            value, out, mask.view(torch.uint8), examples, *words, threshold, bits, grid.count, grid.inner, lines,
            length, group, channels, area, *(grid.shard or (1, 0, 1)), rows, columns, last, grid.shard is not None,
            works,
        )  # fmt: skip


def _channels_last(value: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return value.dim() in formats and value.is_contiguous(memory_format=formats[value.dim()])
