"""The norm of gradients over all ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .transport.base import Transport


def norm(transport: Transport, counted: Iterable[Tensor], ranks: tuple[int, ...]) -> Tensor:
    """The norm of gradients over `ranks`, in float64.  Collective.

    counted: those that this rank adds to the norm; each parameter counts on one rank only.
    """
    square = torch.zeros((), dtype=torch.float64, device=transport.device)
    for gradient in counted:
        square += gradient.abs().double().square().sum()
    transport.all_reduce(square, ranks).wait()
    return square.sqrt()


def clip(gradients: Sequence[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients, whose norm is `total`, so that it is at most `limit`."""
    scale = (limit / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
