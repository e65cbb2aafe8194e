"""Tell whether parts of a batch hold the examples of the whole, and how the rows of an example lie there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from splitc.ir.program import TensorSpec


def outer_rows(
    whole: Tensor, parts: list[Tensor], order: tuple[int, ...], spec: TensorSpec, allowed: Callable[[], float]
) -> int:
    """1 where the parts hold the examples of the whole, 0 where they do not.

    The rows of an example may be apart, (a, examples, b) flattened, of sequences that are flattened time first: then a.
    """
    dim = spec.batch_dim
    assert dim is not None
    if any(part.dim() != whole.dim() or part.shape[dim] % spec.rows for part in (whole, *parts)):
        return 0
    for a in range(1, spec.rows + 1):
        if spec.rows % a:
            continue
        split = [x.unflatten(dim, (a, x.shape[dim] // spec.rows, spec.rows // a)) for x in (whole, *parts)]
        joined = torch.cat(split[1:], dim + 1)
        expected = split[0].index_select(dim + 1, torch.tensor(order, device=whole.device))
        if joined.shape == expected.shape and _close(expected, joined, allowed):
            return a
    return 0


def _close(a: Tensor, b: Tensor, allowed: Callable[[], float]) -> bool:
    if torch.equal(a, b) or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    same = (a == b) | (a.isnan() & b.isnan())
    return bool((same | ((a - b).abs() <= allowed())).all())


def peak(value: Any) -> float:
    """The largest finite magnitude in a tensor of floats; 0 for other values."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return 0.0
    return float(torch.nan_to_num(value.abs(), 0.0, 0.0, 0.0).max())
