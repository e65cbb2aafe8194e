"""Compare a captured graph with its model, and find how the loss adds up over parts of the batch.

Both run on a few real examples, with dropout off and BatchNorm in evaluation mode: a tracer that loses a gradient, or a
loss that couples examples, is found here and not after a week of training.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from splitc.capture.example import Example
from splitc.capture.loss_parts import tolerance
from splitc.capture.loss_terms import loss_terms
from splitc.capture.proxy import map_tree
from splitc.capture.random_calls import draw_layouts
from splitc.capture.source_lines import line_of
from splitc.errors import CaptureError
from splitc.ir.interpreter import NodeRunner
from splitc.ir.layers import LossTerm
from splitc.ir.program import Program, under_autocast
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom


class NoDropout(SeededRandom):
    """Makes dropout the identity; other random functions draw the same numbers for all examples, as `graph` does."""

    def __init__(self, graph: fx.Graph | None = None) -> None:
        super().__init__(Draws(0, 0, None), {} if graph is None else draw_layouts(graph), dropout=False)


class _Steady(NoDropout):
    """Also makes BatchNorm use running statistics, or none, so that examples are independent of each other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return super().__torch_function__(func, types, args, kwargs)
        bound = inspect.signature(func).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        options = {**bound.arguments, "training": False}
        channels = options["input"].shape[1]
        if options["running_mean"] is None:
            options.update(
                running_mean=options["input"].new_zeros(channels), running_var=options["input"].new_ones(channels)
            )
        return func(**options)


class _InFloat32(TorchFunctionMode):
    """Turns casts to the dtype of autocast into casts to float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (map_tree(part, self._widened) for part in (args, kwargs or {}))
        return func(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        return torch.float32 if value is self._dtype else value


@contextmanager
def steady(model: nn.Module, graph: fx.Graph | None = None) -> Iterator[None]:
    """Turn dropout off and let BatchNorm use running statistics; restore attributes and buffers afterwards.

    graph: of the model, which draws what the model draws.
    """
    tensors = [(buffer, buffer.clone()) for buffer in model.buffers()]
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.training = False
    try:
        with _Steady(graph), torch.enable_grad():
            yield
    finally:
        for module, plain, buffers in attributes:
            module.__dict__.clear()
            module.__dict__.update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, before in tensors:
                buffer.copy_(before)


def validate_capture(program: Program, model: nn.Module, example: Example) -> tuple[LossTerm, ...]:
    """Check that the captured graph computes the model's loss and gradients; return the terms of the loss.

    Raises CaptureError when the loss or a gradient differs, or for a term that is no sum or mean over examples.
    """
    root = real_root(program, model, example)
    _compare(program, root, model, example)
    return loss_terms(program, root, example, lambda: _steady_float32(program, model))


def real_root(program: Program, model: nn.Module, example: Example) -> nn.Module:
    """The modules and tensors that the captured graph reads, with their data."""
    root = example.root(model)
    for name, constant in program.root.named_buffers(recurse=False):
        if name not in root._buffers and not hasattr(model, name):
            root._buffers = {**root._buffers, name: constant}
    return root


@contextmanager
def _steady_float32(program: Program, model: nn.Module) -> Iterator[None]:
    """`steady` without autocast: how terms add up is algebra, which rounding to 8 bits would blur."""
    widened = nullcontext() if program.autocast is None else _InFloat32(program.autocast)
    with steady(model), under_autocast(model, None), widened:
        yield


def _compare(program: Program, root: nn.Module, model: nn.Module, example: Example) -> None:
    """Run the model and its graph on two examples.  Raises CaptureError when loss or gradients differ."""
    values = example.rows(slice(2))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def model_loss() -> torch.Tensor:
        loss: torch.Tensor = example.loss_of(example.output(model, values), values)
        return loss

    with steady(model, program.graph):
        with under_autocast(model, program.autocast):
            own = _without_counting(model, model_loss)
        expected = _gradients(program.name, own, list(parameters.values()))
    with steady(model):
        with under_autocast(model, program.autocast):
            captured = NodeRunner(root, program.graph).run_named(values)
        got = _gradients(program.name, captured, list(parameters.values()))
    allowed, noise = tolerance(program.autocast or own.dtype), _noise(expected, program.autocast)
    if not torch.allclose(own, captured, rtol=allowed, atol=allowed / 100, equal_nan=True):
        raise CaptureError(
            f"the captured graph computes a loss of {captured.item():.6g} where the model computes {own.item():.6g}: "
            f"{program.name} does something that a graph cannot hold, such as reading what an earlier call left behind"
        )
    for name, a, b in zip(parameters, expected, got, strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and not _close(a, b, 5 * allowed, noise)):
            raise CaptureError(
                f"the gradient of {name} differs between the model and its captured graph: something between {name} "
                f"and the loss has a backward of its own; write it with torch operations"
            )


def _gradients(name: str, loss: torch.Tensor, parameters: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    try:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        raise CaptureError(f"the backward of {name} fails: {error}") from error


def _without_counting(model: nn.Module, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call `run`.  Raises CaptureError when it fails, or when every call changes a number of the model."""
    before = _numbers(model)
    try:
        value = run()
        first = _numbers(model)
        if first == before:
            return value
        with torch.no_grad():
            run()
    except CaptureError:
        raise
    except Exception as error:
        where = line_of(error) or type(model).__name__
        text = f"{where}: the model fails on two examples of its batch: {type(error).__name__}: {error}"
        raise CaptureError(text) from error
    counting = [name for name, number in _numbers(model).items() if number != first.get(name)]
    if counting:
        raise CaptureError(
            f"every call of {type(model).__name__} changes {', '.join(counting)}, and a graph would keep the number of "
            f"one call; count outside of forward, or in a buffer that forward only adds to (self.steps.add_(1))"
        )
    return value


def _numbers(model: nn.Module) -> dict[str, object]:
    """Python numbers that are attributes of the model's modules."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float)) and name != "training"
    }


def _noise(gradients: tuple[torch.Tensor | None, ...], autocast: torch.dtype | None) -> float:
    """The absolute rounding error allowed in each element of a gradient.

    A gradient that is mathematically zero (of an attention's key bias) is a rounding error of terms that cancel; the
    RMS of all gradients stands for the size of those terms.
    """
    found = [g for g in gradients if g is not None]
    if not found:
        return 0.0
    rms = math.sqrt(sum(_norm(g) ** 2 for g in found) / max(sum(g.numel() for g in found), 1))
    return 8 * max(torch.finfo(autocast or g.dtype).eps for g in found) * rms


def _close(a: torch.Tensor, b: torch.Tensor, relative: float, noise: float) -> bool:
    """Whether two gradients agree up to rounding, and are not finite at the same elements."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    return _norm(a - b) <= relative * _norm(a) + noise * math.sqrt(a.numel())


def _norm(tensor: torch.Tensor) -> float:
    """The L2 norm of the finite elements, summed in float32 at least."""
    finite = torch.where(tensor.isfinite(), tensor, 0)
    return float(torch.linalg.vector_norm(finite, dtype=torch.promote_types(tensor.dtype, torch.float32)))
