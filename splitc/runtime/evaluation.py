"""The loss and the model's output in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .nested import named
from .own_code import has_own_buffers
from .rank import Rank
from .spec import StepContext
from .stage_state import StageState


class Evaluation:
    """Evaluates batches on a rank's stage.

    program: the generated module.  alike: whether all holders of a buffer have the first one's; evaluation
    leaves them so, unless a rank runs own code that has buffers.  Constructing it is collective.
    """

    def __init__(self, rank: Rank, state: StageState, program: Any) -> None:
        self._rank, self._state, self._program = rank, state, program
        self.alike = False
        self._buffers_stay = not any(rank.transport.all_gather_objects(has_own_buffers(state.stage)))

    def loss(self, batch: tuple[Tensor, ...], context: StepContext) -> Tensor:
        """The global loss of a batch.  Buffers are the first replica's.  Collective."""
        stage = self._state.stage
        with evaluating(stage), torch.no_grad(), self._rank.step(context) as comms:
            self._share_buffers()
            loss: Tensor = self._program.evaluate(*comms, stage, *self._rank.on_device(batch))
            return loss

    def loss_anew(self, batch: tuple[Tensor, ...], context: StepContext) -> Tensor:
        """The loss of a batch of a sample, between which buffers are computed anew."""
        self.alike = False
        loss = self.loss(batch, context)
        self.alike = False
        return loss

    def require_output(self) -> Callable[..., Any]:
        """The generated `predict`.  Raises LaunchError where the model's output could not be compiled."""
        if why := self._rank.spec.no_outputs:
            raise LaunchError(f"the model's output cannot be predicted: {why}")
        if (predict := getattr(self._program, "predict", None)) is None:
            raise LaunchError("this build was written before there was worker.predict; compile the model again")
        return predict  # type: ignore[no-any-return]

    def output(self, batch: tuple[Tensor, ...], context: StepContext) -> Any:
        """What the model returns for this rank's examples; None where it reads no data.  Collective."""
        predict, stage = self.require_output(), self._state.stage
        with evaluating(stage), torch.no_grad(), self._rank.step(context, predicts=True) as comms:
            self._share_buffers()
            return named(predict(*comms, stage, *self._rank.on_device(batch)))

    def _share_buffers(self) -> None:
        """Overwrite all buffers by those of the first rank that holds them, if they may differ.

        Those of the same ranks and dtype travel together.
        """
        if self.alike:
            return
        transport, buffers = self._rank.transport, dict(self._state.stage.named_buffers())
        holders, travelling = self._state.buffer_holders().items(), []
        keys = sorted((ranks, str(buffers[key].dtype), key) for key, ranks in holders if len(ranks) > 1)
        for (ranks, _), some in groupby(keys, itemgetter(0, 1)):
            own = [buffers[key] for *_, key in some]
            flat = torch.cat([each.reshape(-1) for each in own])
            travelling.append((own, flat, transport.broadcast(flat, ranks[0], ranks)))
        for own, flat, work in travelling:
            work.wait()
            for buffer, values in zip(own, flat.split([each.numel() for each in own]), strict=True):
                buffer.copy_(values.view_as(buffer))
        self.alike = self._buffers_stay


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
