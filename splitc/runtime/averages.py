"""Exponential moving averages of the parameters that a rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .errors import LaunchError


class MovingAverages:
    """They begin as the parameters are, and every update is mixed in by torch's `get_ema_multi_avg_fn(decay)`."""

    def __init__(self, decay: float, trained: Sequence[tuple[str, nn.Parameter]]) -> None:
        if not isinstance(decay, float) or not 0 <= decay < 1:
            raise LaunchError(f"ema={decay!r}: give the weight of the average, from 0 to below 1, such as 0.999")
        self._mix, self._parameters = get_ema_multi_avg_fn(decay), [parameter for _, parameter in trained]
        self.tensors = {name: parameter.detach().clone() for name, parameter in trained}

    def update(self) -> None:
        """Mix in the parameters."""
        if self.tensors:
            self._mix(list(self.tensors.values()), self._parameters, 0)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the parameters, which were loaded."""
        for average, parameter in zip(self.tensors.values(), self._parameters, strict=True):
            average.copy_(parameter)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchange parameters and averages while this holds."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in zip(self.tensors.values(), self._parameters, strict=True):
            kept: Tensor = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
