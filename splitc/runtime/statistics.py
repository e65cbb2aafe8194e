"""Statistics of normalisations for inference, computed of a sample of training data on the whole model (IST 3.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Tensor, ...], tuple[int, ...] | None]
"""This rank's part of a batch, and how many examples each reader gives to it."""

_SAMPLE = 8
"""Batches that are kept for a sample at most."""


class Statistics:
    """The means and deviations of a stage's normalisations, which training does not know.

    recomputed: their paths.  evaluate: computes a batch in evaluation mode.
    """

    def __init__(
        self,
        stage: nn.Module,
        recomputed: Sequence[str],
        evaluate: Callable[[tuple[Tensor, ...], tuple[int, ...] | None], Tensor],
    ) -> None:
        self._norms: list[Any] = [stage.get_submodule(path) for path in recomputed]
        self._evaluate = evaluate
        self._sample: deque[Batch] = deque(maxlen=_SAMPLE)

    def keep(self, batch: tuple[Tensor, ...], sizes: tuple[int, ...] | None) -> None:
        """Keep a batch that was trained on for the next sample."""
        if self._norms:
            self._sample.append((batch, sizes))

    def recompute(self, sample: Sequence[Batch] | None = None) -> None:
        """Compute all statistics of a sample, by default of the batches kept since the last time; none: leave them.

        Layer by layer: a normalisation sees the whole sample when those before it have their new statistics.
        """
        sample = list(self._sample) if sample is None else sample
        self._sample.clear()
        for norm in self._norms if sample else ():
            moments = _Moments()
            with norm.register_forward_pre_hook(moments):
                for batch, sizes in sample:
                    self._evaluate(batch, sizes)
            norm.running_mean.copy_(moments.mean)
            norm.running_var.copy_(moments.variance)


class _Moments:
    """A hook that adds up a module's inputs over examples, in float64."""

    def __init__(self) -> None:
        self._count = 0
        self._sum: Tensor | float = 0.0
        self._squares: Tensor | float = 0.0

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].detach().double().transpose(0, 1).flatten(1)
        self._count += values.shape[1]
        self._sum = self._sum + values.sum(1)
        self._squares = self._squares + values.square().sum(1)

    @property
    def mean(self) -> Tensor:
        return torch.as_tensor(self._sum) / self._count

    @property
    def variance(self) -> Tensor:
        """Unbiased, as that of a normalisation in training."""
        spread = torch.as_tensor(self._squares) - self._count * self.mean.square()
        return spread.clamp(min=0) / max(self._count - 1, 1)
