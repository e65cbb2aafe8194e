"""Draw batches on which a model shows what it does: no constant inputs, equal rows or masks of ones.

    floats           the example's rows with noise, also where they are constant; a range of 0..1 or 0.. is kept
    whole numbers    0 up to their bound, else the range seen; also where floats hold them (ids in a column)
    masks            0 and 1 at random; no row is empty or full where none of the example's is
    distributions    rows that sum to one do so again

Where a model does not run on such data, what is nearer to the example is tried: see `Draw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from splitc.errors import CaptureError
from splitc.ir.program import Program
from splitc.runtime.data import readable


class Draw(IntEnum):
    """How far data are from the example's; `text` says what is drawn."""

    GENERIC = 0
    SEEN = 1
    ROWS = 2
    EXAMPLE = 3

    @property
    def text(self) -> str:
        return (
            "generic data",
            "noise beside the whole numbers, masks and signs of the example",
            "rows of the example in another order",
            "the example itself",
        )[self]


@dataclass(frozen=True)
class GenericData:
    """Draws batches like the tensors of an example.

    bounds: exclusive upper bound of whole numbers, where their readers imply one.
    batch_dims: the dim along which a tensor holds its examples, where that is not 0; None: it is whole on every rank.
    part: see `Program`; its examples are drawn as they lie, with noise on floats alone.
    """

    tensors: Mapping[str, Tensor]
    bounds: Mapping[str, Any] = field(default_factory=dict)
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    part: Callable[[Mapping[str, Tensor], int, int], dict[str, Tensor]] | None = None
    number: int = 0

    @classmethod
    def of(cls, program: Program, tensors: Mapping[str, Tensor]) -> GenericData:
        """Data for the inputs of `program`, like `tensors`."""
        dims = {each.name: each.spec.batch_dim for each in program.inputs}
        bounds = {each.name: each.bound for each in program.inputs if each.bound is not None}
        return cls(tensors, bounds, dims, program.part, program.batch)

    def draw(self, size: int, seed: int, how: Draw = Draw.GENERIC) -> dict[str, Tensor]:
        """A batch of `size` examples by name, on the devices and in the dtypes of the tensors."""
        generator = torch.Generator().manual_seed(seed)
        rows = None
        drawn = {}
        for name, tensor in self._as_they_lie(size, seed).items():
            noisy = how < Draw.ROWS and tensor.is_floating_point() and tensor.numel() > 0
            seen = tensor.detach().cpu()
            drawn[name] = _drawn(seen, seen, None, how, generator).to(tensor.device) if noisy else tensor
        for name, tensor in self.tensors.items():
            if name in drawn:
                continue
            dim = self.batch_dims.get(name, 0) or 0
            seen = tensor.detach().cpu().movedim(dim, 0)
            if rows is None:
                rows = torch.randint(len(seen), (size,), generator=generator)
            chosen = seen[torch.arange(size) % len(seen) if how is Draw.EXAMPLE else rows]
            if how < Draw.ROWS and chosen.numel():
                bound = self.bounds.get(name)
                if isinstance(bound, list):
                    bound = torch.tensor(bound).expand_as(tensor).movedim(dim, 0)[:1]
                chosen = _drawn(seen, chosen, bound, how, generator)
            drawn[name] = _in_memory_as(tensor, chosen.movedim(0, dim)).to(tensor.device)
        return {name: drawn[name] for name in self.tensors}

    def _as_they_lie(self, size: int, seed: int) -> Mapping[str, Tensor]:
        """What is taken in the example's order: tensors that are whole on every rank, or that a function divides."""
        if self.part is None:
            return {name: tensor for name, tensor in self.tensors.items() if self.batch_dims.get(name, 0) is None}
        if size > self.number:
            raise CaptureError(
                f"batch= is a function that takes examples, of which the example has {self.number}, and {size} are "
                f"needed to compare; give an example of so many"
            )
        first = seed % (self.number - size + 1)
        return self.part(self.tensors, first, first + size)


def _in_memory_as(seen: Tensor, drawn: Tensor) -> Tensor:
    """`drawn` with its dims in memory as those of `seen` are, so that what is a view of one is one of both."""
    order = list(range(seen.dim()))
    if not seen.is_contiguous():
        order.sort(key=lambda dim: -seen.stride()[dim])
    return drawn.permute(order).contiguous().permute([order.index(dim) for dim in range(seen.dim())])


def _drawn(seen: Tensor, chosen: Tensor, bound: Any, how: Draw, generator: torch.Generator) -> Tensor:
    """Values like those of `seen`, of the shape of `chosen`, which are some of its rows.

    bound: of whole numbers: one, a tensor of one for each column, or None.
    """
    if seen.is_complex():
        parts = torch.view_as_real(seen), torch.view_as_real(chosen)
        return torch.view_as_complex(_floats(*parts, None, how, generator).to(parts[0].dtype).contiguous())
    if seen.dtype.is_floating_point:
        return _floats(readable(seen), chosen.double(), bound, how, generator).to(seen.dtype)
    if how is Draw.SEEN:
        return chosen
    low, high = int(seen.min()), int(seen.max())
    if seen.dtype == torch.bool or (bound is None and low >= 0 and high <= 1):
        return _without_empty_rows(seen, chosen, torch.randint(2, chosen.shape, generator=generator).to(seen.dtype))
    first, last = (0, bound) if bound is not None else (low, high + 1)
    numbers = (torch.randint(1 << 62, chosen.shape, generator=generator) % (last - first) + first).to(seen.dtype)
    return numbers if low >= first else torch.where(chosen < first, chosen, numbers)


def _floats(seen: Tensor, chosen: Tensor, bound: int | None, how: Draw, generator: torch.Generator) -> Tensor:
    low, high = map(float, seen.aminmax())
    if not math.isfinite(low + high):
        seen = torch.where(seen.isfinite(), seen, 0)
        low, high = map(float, seen.aminmax())
    spread = float(seen.std(correction=0)) or max(abs(low), 1.0)
    drawn = chosen + spread * torch.randn(chosen.shape, generator=generator, dtype=chosen.dtype)
    uniform = torch.rand(chosen.shape, generator=generator, dtype=chosen.dtype)
    if low >= 0 and (low < high or how is Draw.SEEN):
        drawn = (chosen + uniform) / 2 if low < high <= 1 else drawn.abs()
    few = torch.where(chosen.isfinite(), chosen, 0)  # where they hold no such rows or columns, `seen` has none
    sums = (each.sum(-1) for each in (few, seen)) if seen.dim() > 1 and seen.shape[-1] > 1 and low >= 0 else ()
    if sums and all(torch.allclose(each, torch.ones_like(each), 1e-3) for each in sums):
        drawn = drawn / drawn.sum(-1, keepdim=True)
    elif bool(_are_whole(few).any()):
        numbers, is_number = _numbers(seen, bound, uniform)
        numbers = chosen if how is Draw.SEEN else _without_empty_rows(seen, chosen, numbers)
        drawn = torch.where(is_number, numbers, drawn)
    return torch.where(chosen.isfinite(), drawn, chosen)


def _rows(seen: Tensor) -> tuple[int, ...]:
    """All dims but the last one; the only one."""
    return tuple(range(max(seen.dim() - 1, 1)))


def _are_whole(seen: Tensor) -> Tensor:
    """Which columns of the last dim hold whole numbers."""
    return (seen == seen.round()).all(_rows(seen))


def _numbers(seen: Tensor, bound: int | None, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers for the columns of the last dim that hold such, and which columns these are.

    A constant is none, unless its readers bound it or all columns are whole.
    """
    whole, edges = _are_whole(seen), (seen.amin(_rows(seen)), seen.amax(_rows(seen)))
    low, high = (edge.to(uniform.dtype) for edge in edges)
    if bool(whole.all()) and bool(seen.min() < seen.max()):
        low, high = (torch.where(high > low, edge, seen.aminmax()[k]) for k, edge in enumerate((low, high)))
    elif bool(whole.all()) and bound is not None:
        low, high = torch.zeros_like(low), torch.full_like(high, bound - 1)
    return low + (uniform * (high - low + 1)).floor(), whole & (low < high)


def _without_empty_rows(seen: Tensor, chosen: Tensor, drawn: Tensor) -> Tensor:
    """A mask with the rows of `chosen` in place of those all 0, or all 1, where `seen` has no such row."""
    if seen.dim() < 2 or not bool(((seen == 0) | (seen == 1)).all()):
        return drawn
    for value in (0, 1):
        if not bool((seen == value).all(-1).any()):
            drawn = torch.where((drawn == value).all(-1, keepdim=True), chosen, drawn)
    return drawn
