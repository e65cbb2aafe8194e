"""Train the user's model in this process, as the reference that `verify` compares the ranks with.

Dropout and other random functions draw the ranks' numbers, and each BatchNorm normalises over the groups of examples
that the ranks form, replayed call by call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from splitc.capture.example import Example
from splitc.capture.proxy import map_tree
from splitc.capture.random_calls import draw_layouts
from splitc.capture.regions import own_draws
from splitc.capture.twins import CASTS, WIDE
from splitc.ir import comm_ops
from splitc.ir.autocast import under_autocast
from splitc.ir.graph import info, region_of
from splitc.ir.program import PlacedProgram, Program, SizeSpec, TensorSpec
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.spec import StepContext, microbatch_examples
from splitc.verify.borrowed import borrowed, converted

LEARNING_RATE, MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class NormGroup:
    """Rows of a batch that one BatchNorm call normalises over together.

    counts: whether they update the running statistics, as those of the first replica do.
    """

    rows: Tensor
    counts: bool


class _Replay(SeededRandom):
    """For one step: the ranks' random numbers, and each BatchNorm call over the groups of examples that they form."""

    def __init__(self, program: Program, step: int, examples: int, groups: Sequence[Sequence[NormGroup]]) -> None:
        super().__init__(Draws(0, step, [(0, examples)]), draw_layouts(program))
        self._calls = iter(groups)

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


def norm_groups(program: PlacedProgram, local_batches: Sequence[int]) -> list[list[NormGroup]]:
    """The groups of every batch_norm call of the model, in order."""
    found = []
    for node, rows in _norms(program):
        role = program.plan.placements[info(node).layer].role
        if not rows.scale:  # it normalises a weight
            found.append([NormGroup(torch.arange(rows.offset), counts=True)])
        else:
            found.append(_groups(program, role, local_batches, rows.scale))
    return found


def _norms(program: Program) -> Iterator[tuple[fx.Node, SizeSpec]]:
    """The node of every BatchNorm call, and the rows that it normalises; a region may have several."""
    for node in program.graph.nodes:
        module = program.root.get_submodule(node.target) if node.op == "call_module" else None
        if (own := region_of(program, node)) is not None:
            yield from ((node, rows) for rows in own.norms)
        elif isinstance(module, _BatchNorm) or node.target in (F.batch_norm, comm_ops.batch_norm):
            spec = info(node).spec
            if not isinstance(spec, TensorSpec):
                yield node, SizeSpec(1)
            else:
                yield node, SizeSpec(0, spec.shape[0]) if spec.batch_dim is None else SizeSpec(spec.rows)


def _groups(program: PlacedProgram, role: str, local_batches: Sequence[int], rows: int) -> list[NormGroup]:
    """The examples that the ranks of a role run in one forward: of each group in each microbatch."""
    plan = program.plan
    step = StepContext(plan.batch_offsets[plan.reader], tuple(accumulate(local_batches, initial=0)))
    ranks = plan.roles[role]
    grouping = plan.grouping(role)
    if plan.synchronised:
        return [NormGroup(torch.arange(sum(local_batches) * rows), counts=True)]
    found = []
    for first in range(0, len(ranks), grouping.size):
        members = ranks[first : first + grouping.size]
        for microbatch in range(grouping.num_microbatches):
            parts = [
                microbatch_examples(
                    step.interval(plan.interval(role, rank)), grouping.scheme, k, microbatch, grouping.size
                )
                for k, rank in enumerate(members)
            ]
            indices = torch.cat([torch.arange(a * rows, b * rows) for a, b in parts])
            if len(indices):
                found.append(NormGroup(indices, counts=first == 0))
    return found


def _further_calls(program: PlacedProgram, local_batches: Sequence[int]) -> dict[str, int]:
    """BatchNorm module -> its calls in a step on the first replica after the first: one for each further microbatch."""
    found: dict[str, int] = {}
    calls = iter(norm_groups(program, local_batches))
    for node, _ in _norms(program):
        more = sum(group.counts for group in next(calls)) - 1
        if more > 0 and node.op == "call_module":
            found[str(node.target)] = found.get(str(node.target), 0) + more
    return found


def _count_batches(module: nn.Module, batches: int) -> None:
    """Add to the counter of a BatchNorm that counts its batches."""
    counter = getattr(module, "num_batches_tracked", None)
    if isinstance(counter, Tensor) and module.training:
        counter += batches


def reference(
    program: PlacedProgram,
    model: nn.Module,
    example: Example,
    batches: Sequence[Mapping[str, Tensor]],
    local_batches: Sequence[int],
    states: Sequence[Mapping[str, Tensor]] = (),
) -> Trial:
    """Train the same steps in this process, on global batches; step k + 1 starts from `states[k]` where given.

    The model is borrowed: it trains, and is given back as it was.
    """
    with borrowed(model, example.loss):
        return _train(program, model, example, batches, local_batches, states)


def exact_reference(
    program: PlacedProgram,
    model: nn.Module,
    example: Example,
    batches: Sequence[Mapping[str, Tensor]],
    local_batches: Sequence[int],
    states: Sequence[Mapping[str, Tensor]] = (),
) -> Trial:
    """The reference in float64 without autocast: the same steps without rounding.  Raises what the model raises."""
    wide = [{name: converted(value, torch.float64) for name, value in batch.items()} for batch in batches]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with borrowed(model, example.loss, torch.float64), _InFloat64():
            return _train(replace(program, autocast=None), model, example, wide, local_batches, states)
    finally:
        torch.set_default_dtype(before)


def loss_of_copy(program: Program, model: nn.Module, example: Example, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss of one batch, of the borrowed model."""
    size = next(iter(batch.values())).shape[program.inputs[0].spec.batch_dim or 0]
    seeded = SeededRandom(Draws(0, 0, [(0, size)]), draw_layouts(program))
    with borrowed(model, example.loss), seeded, under_autocast(model, program.autocast), torch.no_grad():
        loss: Tensor = example.loss_of(example.output(model, batch), batch)
        return loss


def _train(
    program: PlacedProgram,
    model: nn.Module,
    example: Example,
    batches: Sequence[Mapping[str, Tensor]],
    local_batches: Sequence[int],
    states: Sequence[Mapping[str, Tensor]],
) -> Trial:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    trial = Trial()
    groups = norm_groups(program, local_batches)
    further_calls = _further_calls(program, local_batches)
    for step, batch in enumerate(batches):
        if step and states:
            model.load_state_dict(states[step - 1])
        optimizer.zero_grad()
        replay = _Replay(program, step, sum(local_batches), groups)
        with replay, own_draws(model, program.graph), under_autocast(model, program.autocast):
            loss: Tensor = example.loss_of(example.output(model, batch), batch)
        loss.backward()
        trial.losses.append(float(loss.detach()))
        trial.gradients.append({name: gradient.clone() for name, gradient in _gradients(model)})
        optimizer.step()
        for path, calls in further_calls.items():
            _count_batches(model.get_submodule(path), calls)
        trial.states.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    return trial


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradients with elements."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.numel():
            yield name, parameter.grad


class _InFloat64(TorchFunctionMode):
    """Turns casts and factories of lower precision into float64, where a model asks for one by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (map_tree(part, self._widened) for part in (args, kwargs or {}))
        return (Tensor.double if func in CASTS else func)(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value
