"""Hold one data-parallel step of a compiled program against the user's eager model, apart from `verify`.

Two ranks, each with a batch of its own, on simulated transports.  Dropout is taken out of a copy of the model before it
is compiled.  A model with BatchNorm runs eagerly on each rank's batch, as under DDP, and the step's loss is the mean of
the two; any other runs on both batches at once.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.real_models.case import Case, sliced
from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker

LEARNING_RATE = 0.05
FLOAT32 = 1e-5  # what one batch and its two halves may differ by in a model that computes in float32 inside


@dataclass(frozen=True)
class Difference:
    """Relative L2 errors of one step: the loss, and the worst gradient, and the worst parameter or buffer after it.

    rounding: the error of eager's own gradients where its examples are in another order, or run in two halves.
    """

    loss: float
    gradient: float
    state: float
    worst: str
    rounding: float

    @property
    def largest(self) -> float:
        """The largest of the three."""
        return max(self.loss, self.gradient, self.state)


def case_dtype(case: Case) -> torch.dtype:
    """The dtype of the first parameter that is trained."""
    return next(p.dtype for p in case.module.parameters() if p.requires_grad)


def without_dropout(module: nn.Module) -> nn.Module:
    """A copy in which nothing is dropped: floats below 1 of attributes or classes that are called so are 0."""
    module = copy.deepcopy(module)
    for part in module.modules():
        drops = any(word in type(part).__name__.lower() for word in ("drop", "stochasticdepth"))
        for name, value in vars(part).items():
            if ("drop" in name or (drops and name in ("p", "prob"))) and type(value) is float and 0 < value < 1:
                setattr(part, name, 0.0)
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
    return module


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a module normalises over the batch."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def scalar_loss(case: Case, inputs: Any, target: Any, module: nn.Module) -> Tensor:
    """The eager loss, by the rules of `splitc.compile`: a mapping of keyword arguments, a tuple, or one input."""
    if isinstance(inputs, dict):
        output = module(**inputs)
    elif isinstance(inputs, tuple):
        output = module(*inputs)
    else:
        output = module(inputs)
    if case.loss is not None:
        value = case.loss(output, *(target if isinstance(target, tuple) else (target,)))
    elif isinstance(output, Tensor):
        value = output
    elif isinstance(output, tuple):
        value = next(part for part in output if part.dim() == 0)
    else:
        value = output.loss
    assert isinstance(value, Tensor)
    return value


def reordered(case: Case, batch: int) -> Case:
    """The case with the examples of each rank in reverse order."""
    rows = torch.cat([torch.arange(batch).flip(0), torch.arange(batch, 2 * batch).flip(0)])
    return dataclasses.replace(case, inputs=sliced(case.inputs, rows), target=sliced(case.target, rows))


def eager_step(case: Case, batch: int, apart: bool) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and state after one SGD step on two batches of `batch` examples, in one process.

    apart: one batch after the other, and the mean of their losses.
    """
    module = copy.deepcopy(case.module)
    if apart:
        loss = scalar_loss(case, *case.rows(slice(0, batch)), module) / 2
        loss.backward()
        other = copy.deepcopy(case.module)  # so that the buffers are those of the first rank
        half = scalar_loss(case, *case.rows(slice(batch, None)), other) / 2
        half.backward()
        for mine, its in zip(module.parameters(), other.parameters(), strict=True):
            if its.grad is not None:
                mine.grad = its.grad if mine.grad is None else mine.grad + its.grad
        loss = loss + half
    else:
        loss = scalar_loss(case, case.inputs, case.target, module)
        loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE).step()
    return float(loss.detach()), gradients, {k: v.detach().clone() for k, v in module.state_dict().items()}


def compiled_step(
    program: CompiledProgram, case: Case, batch: int
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses and gradients of both ranks, and the state after the step."""
    halves = [case.rows(slice(0, batch)), case.rows(slice(batch, None))]
    feeds = [tuple(Example.bind(case.module, *half, case.loss).tensors.values()) for half in halves]

    def run(transport: Transport) -> tuple[float, dict[str, Tensor], dict[str, Tensor] | None]:
        weights = program.weights()
        held = {k: v.clone() for k, v in {**weights["state"], **weights["extra"]}.items()}
        part = load_rank(program.files, transport.rank, program.request.own)
        worker = Worker(part, transport, held, first_names(weights["state"]), _sgd)
        loss = float(worker.step(*feeds[transport.rank]))
        gradients = {name: gradient.detach().clone() for name, gradient in worker.gradients().items()}
        return loss, gradients, worker.state_dict()

    found = run_ranks(2, run)
    states = [state for _, _, state in found if state is not None]
    return [loss for loss, _, _ in found], [gradients for _, gradients, _ in found], states[0]


def difference(program: CompiledProgram, case: Case, batch: int) -> Difference:
    """One step on two ranks against the eager model, which neither changes.  case: twice `batch` examples."""
    apart = has_batch_norm(case.module)
    loss, gradients, state = eager_step(case, batch, apart)
    floor = 1e-5 if case_dtype(case) == torch.float64 else 1e-3
    rounding = max(_errors(eager_step(reordered(case, batch), batch, apart)[1], gradients, floor).values(), default=0.0)
    if not apart:
        halves = max(_errors(eager_step(case, batch, apart=True)[1], gradients, floor).values(), default=0.0)
        rounding = max(rounding, halves if halves < FLOAT32 else 0.0)
    losses, by_rank, after = compiled_step(program, case, batch)
    of_loss = max(abs(other - loss) for other in losses) / max(abs(loss), 1e-12)
    first_name = {id(p): name for name, p in case.module.named_parameters()}
    names = {alias: first_name[id(p)] for alias, p in case.module.named_parameters(remove_duplicate=False)}
    of_gradients: dict[str, float] = {}
    for got in by_rank:
        got = {names[alias]: gradient for alias, gradient in got.items()}  # of a tied parameter any of its names
        for name, error in _errors(got, gradients, floor).items():
            of_gradients[name] = max(error, of_gradients.get(name, 0.0))
    of_state = _errors(after, state, floor)
    errors = {"the loss": of_loss}
    errors |= {f"{name} (gradient)": error for name, error in of_gradients.items()}
    errors |= {f"{name} (value)": error for name, error in of_state.items()}
    return Difference(
        of_loss,
        max(of_gradients.values(), default=0.0),
        max(of_state.values(), default=0.0),
        max(errors, key=lambda name: errors[name]),
        rounding,
    )


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LEARNING_RATE)


def _errors(got: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> dict[str, float]:
    """||a - b|| / max(||b||, floor * the rms of all), infinite where one is missing or a counter differs."""
    numel = sum(b.numel() for b in expected.values())
    rms = (sum(float(b.detach().abs().double().square().sum()) for b in expected.values()) / max(numel, 1)) ** 0.5
    errors = {}
    for name in expected.keys() | got.keys():
        if name not in got or name not in expected:
            present = got.get(name, expected.get(name))
            zero = present is not None and not bool(present.any())
            errors[name] = 0.0 if zero else float("inf")  # a gradient of zeros and none are the same update
            continue
        a, b = got[name], expected[name]
        if not b.dtype.is_floating_point and not b.dtype.is_complex:
            errors[name] = 0.0 if torch.equal(a, b) else float("inf")
            continue
        distance = float(torch.where(a == b, 0, a - b).abs().double().norm())
        errors[name] = distance / max(float(b.abs().double().norm()), floor * rms * b.numel() ** 0.5, 1e-30)
        if errors[name] != errors[name]:
            errors[name] = float("inf")
    return errors
