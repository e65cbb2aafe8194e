"""The loss and the model's output in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .nested import named
from .rank import Rank
from .spec import StepContext
from .stage_state import StageState


class Evaluation:
    """Evaluates batches on a rank's stage.

    run, predict: the generated functions.
    """

    def __init__(
        self, rank: Rank, state: StageState, run: Callable[..., Tensor], predict: Callable[..., Any] | None
    ) -> None:
        self._rank, self._state, self._run, self._predict = rank, state, run, predict

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
