"""A step of a unit of ranks in this process, with the random numbers and the normalisations of the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.regions.regions import own_draws
from splitc.capture.trace.random_calls import draw_layouts
from splitc.ir.autocast import under_autocast
from splitc.ir.program import LoweredProgram
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.verify.norm_groups import further_calls, norm_groups, unit_examples

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


class Unit:
    """Ranks that train together, as one process on their part of the global batch: all, where there are no rounds.

    examples: theirs, of the global batch.  groups: of each BatchNorm call.  state: of the model, as they leave it.
    """

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

    def step(self, batch: Mapping[str, Tensor], replay: SeededRandom, gradients: bool) -> None:
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
            module = model.get_submodule(path)
            if isinstance(counter := getattr(module, "num_batches_tracked", None), Tensor) and module.training:
                counter += calls


class Replay(SeededRandom):
    """For one step: the ranks' random numbers, and each BatchNorm call over the groups of examples that they form."""

    def __init__(self, unit: Unit, step: int) -> None:
        super().__init__(Draws(0, step, [unit.examples]), draw_layouts(unit.program))
        self._calls = iter(unit.groups)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return super().__torch_function__(func, types, args, kwargs)
        bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        groups = next(self._calls)
        if not options["training"] or len(groups) == 1:
            return func(**options)
        value = options.pop("input")
        parts = []
        for group in groups:
            statistics = {} if group.counts else {"running_mean": None, "running_var": None}
            parts.append(func(value[group.rows], **{**options, **statistics}))
        return torch.cat(parts)[torch.cat([group.rows for group in groups]).argsort()]
