"""Train the user's model in this process, as the reference that `verify` compares the ranks with.

Dropout and other random functions draw the ranks' numbers, and each BatchNorm normalises over the groups of examples
that the ranks form, replayed call by call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.example.example import Example
from splitc.capture.trace.proxy import map_tree
from splitc.capture.trace.random_calls import draw_layouts
from splitc.capture.validate.reference_copy import CASTS, WIDE
from splitc.codegen.rank_spec import rank_spec
from splitc.ir.autocast import under_autocast
from splitc.ir.program import Program
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.verify.batches import number_of_examples
from splitc.verify.borrowed import borrowed, converted
from splitc.verify.features import STATISTICS, joint_of
from splitc.verify.replay import Training, Unit


def reference(training: Training) -> list[Trial]:
    """Train in this process, for each unit of ranks; there is one where there are no rounds.

    The model is borrowed: it trains, and is given back as it was.
    """
    with borrowed(training.model, training.example.loss):
        return _train(training)


def exact_reference(training: Training) -> list[Trial]:
    """The reference in float64 without autocast: the same steps without rounding.  Raises what the model raises."""
    wide = [{name: converted(value, torch.float64) for name, value in batch.items()} for batch in training.batches]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with borrowed(training.model, training.example.loss, torch.float64), _InFloat64():
            return _train(replace(training, program=replace(training.program, autocast=None), batches=wide))
    finally:
        torch.set_default_dtype(before)


def loss_of_copy(program: Program, model: nn.Module, example: Example, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of one batch, of the borrowed model."""
    seeded = SeededRandom(Draws(0, 0, [(0, number_of_examples(program, batch))]), draw_layouts(program))
    with borrowed(model, example.loss), seeded, under_autocast(model, program.autocast):
        loss: Tensor = example.loss_of(example.output(model, batch), batch)
        return loss.detach()


def _train(training: Training) -> list[Trial]:
    program, model, batches, period = training.program, training.model, training.batches, training.period
    recomputed = {f"{path}.{name}" for path in rank_spec(program, 0).recomputed for name in STATISTICS}
    members = sorted({program.plan.unit(rank) for rank in range(program.plan.world)})
    units = [Unit(training, ranks) for ranks in members]
    joint = joint_of(program)(program, model, units)
    for number, first in enumerate(range(0, len(batches), period)):
        begin = training.states[first - 1] if first and training.states else units[0].state
        before = {name: begin[name].to(units[0].state[name].dtype) for name in joint.alike}
        for k, unit in enumerate(units):
            if joint.separates or (first and training.states):
                model.load_state_dict({**unit.state, **before})
            for step, batch in enumerate(batches[first : first + period], first):
                unit.step(batch, joint.replay(number, k, step), joint.has_gradients)
            unit.keep()
        joint.end(number, before)
        units[0].trial.states[-1] = {name: t for name, t in units[0].state.items() if name not in recomputed}
    return [unit.trial for unit in units]


class _InFloat64(TorchFunctionMode):
    """Turns casts and factories of lower precision into float64, where a model asks for one by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (map_tree(part, self._widened) for part in (args, kwargs or {}))
        return (Tensor.double if func in CASTS else func)(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value
