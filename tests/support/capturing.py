"""Capture a model and hold what was captured against the model itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from splitc.capture.capture import as_arguments, capture, step_root, target_names
from splitc.capture.validate import NoDropout, validate_capture
from splitc.errors import CaptureError
from splitc.ir.interpreter import NodeRunner, shapes_at
from splitc.ir.program import Program
from tests.support.compiled import compiled


def captured(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> Program:
    """The program of a model, with the terms of its loss, after everything about it was checked that can be."""
    program = capture(model, example, target, loss)
    program = replace(program, loss_terms=validate_capture(program, model, example, target, loss))
    for batch in (program.batch, program.batch + 3, 2):
        assert_same_training(program, model, example, target, loss, batch)
        assert shapes_at(program, batch) == []
    return program


def assert_same_training(program: Program, model: nn.Module, example: Any, target: Any, loss: Any, batch: int) -> None:
    """The graph computes the model's loss, gradients and buffers on `batch` examples, in training mode."""
    inputs = as_arguments(model, example)
    targets = target_names(target, inputs)
    rows = torch.arange(batch) % program.batch
    few = {k: v[rows] if isinstance(v, Tensor) else v for k, v in {**inputs, **targets}.items()}
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    with NoDropout():
        expected = _call(theirs, {name: few[name] for name in inputs})
        if loss is not None:
            expected = loss(expected, *(few[name] for name in targets))
        got = NodeRunner(with_constants(step_root(ours, loss), program), program.graph).run_named(few)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"only one of the two has a gradient of {name}"
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=partial("the gradient of {}: {}".format, name))
    for (name, left), right in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(left, right, msg=partial("the buffer {}: {}".format, name))


def with_constants(root: nn.Module, program: Program) -> nn.Module:
    """`root` with the tensors that the model keeps outside its modules."""
    for name, constant in program.root.named_buffers(recurse=False):
        if name not in root._buffers and not hasattr(root, name):
            root._buffers = {**root._buffers, name: constant}
    return root


def _call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    positional = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is p.POSITIONAL_ONLY]
    return model(*(inputs[n] for n in positional), **{n: v for n, v in inputs.items() if n not in positional})


def refusal(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> str:
    """The text of the CaptureError that capturing the model raises."""
    with pytest.raises(CaptureError) as error:
        validate_capture(capture(model, example, target, loss), model, example, target, loss)
    return str(error.value)


def node(program: Program, name: str) -> fx.Node:
    """The node of that name."""
    return next(n for n in program.graph.nodes if n.name == name)


def here(function: Callable[..., Any]) -> str:
    """`test_tracer.py:12`, the line of the function that is marked `# here`."""
    lines, first = inspect.getsourcelines(function)
    (marked,) = [k for k, line in enumerate(lines) if "# here" in line]
    return f"{Path(str(inspect.getsourcefile(function))).name}:{first + marked}"


def forward_lines(model: nn.Module, example: Any, target: Any, loss: Any) -> list[str]:
    """The statements of the forward that is generated for one rank, without comments."""
    text = compiled(model, example, target, loss, 1, "single_device").files["all.py"]
    body = text[text.index("    def forward") : text.index("def step")].splitlines()[1:]
    return [line.partition("  #")[0].strip() for line in body]
