"""Train the user's model in this process, as the reference that `verify` compares the ranks with.

Dropout and other random functions draw the ranks' numbers, and each BatchNorm normalises over the groups of examples
that the ranks form, replayed call by call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.regions.regions import own_draws
from splitc.capture.trace.proxy import map_tree
from splitc.capture.trace.random_calls import draw_layouts
from splitc.capture.validate.twins import CASTS, WIDE
from splitc.codegen.rank_spec import rank_spec
from splitc.ir import comm_ops
from splitc.ir.autocast import under_autocast
from splitc.ir.neurons import find_neurons
from splitc.ir.program import LoweredProgram, Program
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws, Label, Layout
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.spec import Neurons
from splitc.verify.batches import number_of_examples
from splitc.verify.borrowed import borrowed, converted
from splitc.verify.norm_groups import count_batches, further_calls, norm_groups, unit_examples
from splitc.verify.rounds import STATISTICS, Outer, Round, Subnet, shared

LEARNING_RATE, MOMENTUM = 0.01, 0.9


class _Replay(SeededRandom):
    """For one step: the ranks' random numbers, and each BatchNorm call over the groups of examples that they form.

    subnet: what is trained of the model; dropout draws for it as for a tensor of its own.
    """

    def __init__(self, unit: _Unit, step: int, subnet: Subnet) -> None:
        super().__init__(Draws(0, step, [unit.examples]), draw_layouts(unit.program))
        self._calls, self._subnet = iter(unit.groups), subnet

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and self._subnet.inputs:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            return func(**given | {"input": given["input"] * self._subnet.inputs.get(given["weight"], 1)})
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

    def mask(self, value: Tensor, p: float, feature_dims: int, label: Label, layout: Layout | None = None) -> Tensor:
        """`value` after dropout; features that others have are zero."""
        if (own := self._subnet.drawn.get(label)) is None:
            return super().mask(value, p, feature_dims, label, layout)
        at = own.nonzero().flatten()
        return torch.zeros_like(value).index_copy(-1, at, super().mask(value[..., at], p, feature_dims, label, layout))


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
    size = number_of_examples(program, batch)
    seeded = SeededRandom(Draws(0, 0, [(0, size)]), draw_layouts(program))
    with borrowed(model, example.loss), seeded, under_autocast(model, program.autocast), torch.no_grad():
        loss: Tensor = example.loss_of(example.output(model, batch), batch)
        return loss


class _Unit:
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

    def step(self, number: int, batch: Mapping[str, Tensor], subnet: Subnet) -> None:
        """Train on this unit's examples."""
        first, last = self.examples
        batch = examples_of(self.program, batch, first, last)
        model, example = self._model, self._example
        self.optimizer.zero_grad()
        replay, program = _Replay(self, number, subnet), self.program
        with replay, own_draws(model, program.graph), under_autocast(model, program.autocast):
            loss: Tensor = example.loss_of(example.output(model, batch), batch)
        loss.backward()
        self.trial.losses.append(float(loss.detach()))
        held = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.numel()}
        self.trial.gradients.append({} if program.plan.deals else held)
        self.trial.states.append({})
        self.optimizer.step()
        for path, calls in self._further_calls.items():
            count_batches(model.get_submodule(path), calls)


def _train(training: Training) -> list[Trial]:
    plan, model, batches, period = training.program.plan, training.model, training.batches, training.period
    dealt = {name: dims for stage in training.program.stages for name, dims in stage.dealt.items()}
    drawn, momenta = dict(_drawn(training.program)), dict[Tensor, Tensor]()
    recomputed = {f"{path}.{name}" for path in rank_spec(training.program, 0).recomputed for name in STATISTICS}
    units = [_Unit(training, ranks) for ranks in sorted({plan.unit(rank) for rank in range(plan.world)})]
    alike = units[0].state.keys() & shared(model) if plan.rounds else units[0].state.keys()
    outer = None if plan.rounds is None else Outer(plan.rounds, units[0].state, model)
    shares = [(unit.examples[1] - unit.examples[0]) / sum(training.local_batches) for unit in units]
    for number, first in enumerate(range(0, len(batches), period)):
        now = Round(number, dealt, drawn, shares)
        begin = training.states[first - 1] if first and training.states else units[0].state
        before = {name: begin[name].to(units[0].state[name].dtype) for name in alike}
        for k, unit in enumerate(units):
            if plan.rounds or (first and training.states):
                model.load_state_dict({**unit.state, **before})
            for step, batch in enumerate(batches[first : first + period], first):
                unit.step(step, batch, now.subnet(model, k))
            unit.keep()
        if plan.rounds and outer:
            together = {name: now.join(name, old, [unit.state[name] for unit in units]) for name, old in before.items()}
            outer.step(before, together)
            if dealt:
                now.join_momenta(model, momenta, [unit.optimizer for unit in units])
            loss = sum(share * unit.trial.losses[-1] for share, unit in zip(shares, units, strict=True))
            for unit in units:
                unit.state |= together
                if len(unit.trial.losses) == (number + 1) * plan.rounds.steps:
                    unit.trial.losses[-1] = loss
        units[0].trial.states[-1] = {name: t for name, t in units[0].state.items() if name not in recomputed}
    return [unit.trial for unit in units]


def _drawn(program: LoweredProgram) -> Iterator[tuple[Label, Sequence[Neurons]]]:
    """Dropouts of dealt features."""
    for stage in program.stages:
        values = find_neurons(program, stage.graph, program.plan.world).values if stage.dealt else {}
        nodes = [node for node in stage.graph.nodes if node.target is comm_ops.dropout and node.name in values]
        yield from (((node.kwargs["draw"],), values[node.name]) for node in nodes)


class _InFloat64(TorchFunctionMode):
    """Turns casts and factories of lower precision into float64, where a model asks for one by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (map_tree(part, self._widened) for part in (args, kwargs or {}))
        return (Tensor.double if func in CASTS else func)(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value
