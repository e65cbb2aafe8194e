"""Clip gradients by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .stage_state import StageState
from .transport.base import Transport


def clip(
    transport: Transport, gradients: Sequence[Tensor], counted: Iterable[Tensor], limit: float, ranks: tuple[int, ...]
) -> None:
    """Scale `gradients` so that their norm over `ranks` is at most `limit`.  Collective.

    counted: those that this rank adds to the norm; each parameter counts on one rank only.
    """
    square = torch.zeros((), dtype=torch.float64, device=transport.device)
    for gradient in counted:
        square += gradient.abs().double().square().sum()
    transport.all_reduce(square, ranks).wait()
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))


def finish_gradients(state: StageState, accumulate: int, clip_norm: float | None) -> None:
    """Average the gradients of accumulated batches, and clip them."""
    gradients = state.trained_gradients()
    if accumulate > 1:
        for _, gradient in gradients:
            gradient /= accumulate
    if clip_norm is not None:
        counted = [gradient for name, gradient in gradients if state.is_first_holder(name, state.together)]
        clip(state.transport, [gradient for _, gradient in gradients], counted, clip_norm, state.together)
