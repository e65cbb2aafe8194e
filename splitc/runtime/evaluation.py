"""The loss and the model's output in evaluation mode, and the statistics of normalisations that it reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .nested import named
from .rank import Rank
from .spec import StepContext
from .stage_state import StageState

Batch = tuple[tuple[Tensor, ...], StepContext]
"""This rank's part of a batch, and the step that evaluates it."""

_SAMPLE = 8
"""Batches that are kept for a sample at most."""


class Evaluation:
    """Evaluates batches on a rank's stage.

    run, predict: the generated functions.  A rank whose spec names normalisations to be recomputed keeps the last
    batches that it trained on: subnets know the statistics of their own neurons alone, so those of the whole model are
    computed anew of a sample of training data (IST 3.3).
    """

    def __init__(
        self, rank: Rank, state: StageState, run: Callable[..., Tensor], predict: Callable[..., Any] | None
    ) -> None:
        self._rank, self._state, self._run, self._predict = rank, state, run, predict
        self._norms: list[Any] = [state.stage.get_submodule(path) for path in rank.spec.recomputed]
        self._sample: deque[Batch] = deque(maxlen=_SAMPLE)

    def loss(self, batch: tuple[Tensor, ...], context: StepContext) -> Tensor:
        """The global loss of a batch.  Buffers are the first replica's.  Collective."""
        stage = self._state.stage
        with evaluating(stage), torch.no_grad(), self._rank.step(context) as comms:
            self._broadcast_buffers()
            return self._run(*comms, stage, *self._rank.on_device(batch))

    def require_output(self) -> Callable[..., Any]:
        """The generated `predict`.  Raises LaunchError where the model's output could not be compiled."""
        if why := self._rank.spec.no_outputs:
            raise LaunchError(f"the model's output cannot be predicted: {why}")
        if self._predict is None:
            raise LaunchError("this build was written before there was worker.predict; compile the model again")
        return self._predict

    def output(self, batch: tuple[Tensor, ...], context: StepContext) -> Any:
        """What the model returns for this rank's examples; None where it reads no data.  Collective."""
        predict, stage = self.require_output(), self._state.stage
        with evaluating(stage), torch.no_grad(), self._rank.step(context, predicts=True) as comms:
            self._broadcast_buffers()
            return named(predict(*comms, stage, *self._rank.on_device(batch)))

    def keep(self, batch: tuple[Tensor, ...], context: StepContext) -> None:
        """Keep a batch that was trained on for the next sample."""
        if self._norms:
            self._sample.append((batch, replace(context, training=False)))

    def recompute(self, sample: Sequence[Batch] | None = None) -> None:
        """Compute statistics of a sample, by default of the batches kept since the last time; none: leave them.

        Layer by layer: a normalisation sees the whole sample when those before it have their new statistics.
        """
        sample = list(self._sample) if sample is None else sample
        self._sample.clear()
        for norm in self._norms if sample else ():
            moments = _Moments()
            with norm.register_forward_pre_hook(moments):
                for batch, context in sample:
                    self.loss(batch, context)
            norm.running_mean.copy_(moments.mean)
            norm.running_var.copy_(moments.variance)

    def _broadcast_buffers(self) -> None:
        """Overwrite all buffers by those of the first rank that holds them."""
        transport, buffers = self._rank.transport, dict(self._state.stage.named_buffers())
        holders = self._state.buffer_holders()
        for work in [transport.broadcast(buffers[key], ranks[0], ranks) for key, ranks in holders.items()]:
            work.wait()


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Set modules to evaluation mode; restore the flag of each submodule afterwards."""
    before = [(each, each.training) for module in modules for each in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for each, training in before:
            each.training = training


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
