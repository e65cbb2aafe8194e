"""Train the user's model in this process, as the reference that `verify` compares the ranks with.

Dropout and other random functions draw the ranks' numbers, and each BatchNorm normalises over the groups of examples
that the ranks form, replayed call by call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.regions.regions import own_draws
from splitc.capture.trace.proxy import map_tree
from splitc.capture.trace.random_calls import draw_layouts
from splitc.capture.validate.reference_copy import CASTS, WIDE
from splitc.codegen.rank_spec import rank_spec
from splitc.ir.autocast import under_autocast
from splitc.ir.program import LoweredProgram, Program
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.verify.batches import number_of_examples
from splitc.verify.borrowed import borrowed, converted
from splitc.verify.features import STATISTICS, joint_of
from splitc.verify.norm_groups import count_batches, further_calls, norm_groups, unit_examples
from splitc.verify.replay import Replay, Trained

LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Training:
    """Steps to train in this process, on global batches.

    period: steps in a round; each round but the first starts from the state after the step before in `states`, if any.
    """

    program: LoweredProgram
    model: nn.Module
    example: Example
    batches: Sequence[Mapping[str, Tensor]]
    local_batches: Sequence[int]
    period: int = 1
    states: Sequence[Mapping[str, Tensor]] = ()


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
    with borrowed(model, example.loss), seeded, under_autocast(model, program.autocast), torch.no_grad():
        loss: Tensor = example.loss_of(example.output(model, batch), batch)
        return loss


class _Unit(Trained):
    """Ranks that train together, as one process on their part of the global batch: all, where there are no rounds."""

    def __init__(self, training: Training, ranks: Sequence[int]) -> None:
        program, sizes = training.program, training.local_batches
        self.program, self._model, self._example = program, training.model, training.example
        self.examples = unit_examples(program.plan, sizes, ranks)
        self.groups = norm_groups(program, sizes, ranks)
        self._further_calls = further_calls(program, self.groups)
        self.optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.trial = Trial()
        self.keep()

    def keep(self) -> None:
        """Keep a copy of the model's state, which the next unit will change."""
        self.state = {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def step(self, batch: Mapping[str, Tensor], replay: Replay, gradients: bool) -> None:
        """Train on this unit's examples.  gradients: whether they are those of the ranks."""
        first, last = self.examples
        batch = examples_of(self.program, batch, first, last)
        model, example = self._model, self._example
        self.optimizer.zero_grad()
        with replay, own_draws(model, self.program.graph), under_autocast(model, self.program.autocast):
            loss: Tensor = example.loss_of(example.output(model, batch), batch)
        loss.backward()
        self.trial.losses.append(float(loss.detach()))
        held = {n: p.grad.to_dense().clone() for n, p in model.named_parameters() if p.grad is not None and p.numel()}
        self.trial.gradients.append(held if gradients else {})
        self.trial.states.append({})
        self.optimizer.step()
        for path, calls in self._further_calls.items():
            count_batches(model.get_submodule(path), calls)


def _train(training: Training) -> list[Trial]:
    plan, model, batches, period = training.program.plan, training.model, training.batches, training.period
    recomputed = {f"{path}.{name}" for path in rank_spec(training.program, 0).recomputed for name in STATISTICS}
    units = [_Unit(training, ranks) for ranks in sorted({plan.unit(rank) for rank in range(plan.world)})]
    joint = joint_of(training.program)(training.program, model, units)
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
