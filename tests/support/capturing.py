"""Capture a model and hold what was captured against the model itself."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import splitc.capture.capture
from splitc.capture.example.example import Example
from splitc.capture.validate.reference_copy import NoDropout, real_root
from splitc.capture.validate.validate import validate_capture
from splitc.errors import CaptureError
from splitc.ir.comm_ops import store_buffer
from splitc.ir.interpreter import NodeRunner, shapes_at
from splitc.ir.program import Program
from splitc.ir.regions import regions
from tests.support.compiled import compiled


def captured(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> Program:
    """The program of a model, with the terms of its loss, after everything about it was checked that can be."""
    bound = Example.bind(model, example, target, loss)
    program = validated(model, example, target, loss)
    for batch in (program.batch, program.batch + 3, 2):
        assert_same_training(program, model, bound, batch)
        assert shapes_at(program, batch) == []
    return program


def assert_same_training(program: Program, model: nn.Module, example: Example, batch: int) -> None:
    """The graph computes the model's loss, gradients and buffers on `batch` examples, in training mode."""
    values = example.rows([row % program.batch for row in range(batch)])
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    with NoDropout():
        expected = example.loss_of(example.output(theirs, values), values)
        runner = NodeRunner(real_root(program, ours, example), program.graph, lambda node, run: run())
        got = runner.run_named(values)
    expected.backward()
    got.backward()
    for stored in (n for n in program.graph.nodes if n.target is store_buffer):
        buffer, value = (runner.env[n] for n in stored.all_input_nodes)
        buffer.data.copy_(value)
    torch.testing.assert_close(got, expected)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), f"only one of the two has a gradient of {name}"
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=partial("the gradient of {}: {}".format, name))
    for name, left in ours.named_buffers():
        torch.testing.assert_close(left, theirs.get_buffer(name), msg=partial("the buffer {}: {}".format, name))


def capture(model: nn.Module, example: Any, target: Any = None, loss: Any = None, **options: Any) -> Program:
    """`splitc.capture.capture.capture` of a batch as users give it."""
    return splitc.capture.capture.capture(model, Example.bind(model, example, target, loss), **options)


def validated(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> Program:
    """The program of a model, with the terms of its loss, validated as `splitc.compile` does."""
    bound = Example.bind(model, example, target, loss)
    program = splitc.capture.capture.capture(model, bound)
    program = validate_capture(program, model, bound)
    if program.coupled:
        raise CaptureError(program.coupled[0].why)
    return program


def refusal(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> str:
    """Why the model cannot be traced: the text of its CaptureError, or that of its first region."""
    try:
        program = splitc.capture.capture.capture(model, Example.bind(model, example, target, loss))
        if found := [own for _, own in regions(program)]:
            return found[0].why
        validated(model, example, target, loss)
    except CaptureError as error:
        return str(error)
    pytest.fail("the model is captured")


def node(program: Program, name: str) -> fx.Node:
    """The node of that name."""
    return next(n for n in program.graph.nodes if n.name == name)


def here(function: Callable[..., Any]) -> str:
    """`test_tracer.py:12`, the line of the function that is marked `# here`, or of a lambda."""
    if function.__name__ == "<lambda>":
        return f"{Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno}"
    lines, first = inspect.getsourcelines(function)
    (marked,) = [k for k, line in enumerate(lines) if "# here" in line]
    return f"{Path(str(inspect.getsourcefile(function))).name}:{first + marked}"


def forward_lines(model: nn.Module, example: Any, target: Any, loss: Any) -> list[str]:
    """The statements of the forward that is generated for one rank, without comments."""
    text = compiled(model, example, target, loss, 1, "single_device").files["all.py"]
    body = text[text.index("    def forward") : text.index("def step")].splitlines()[1:]
    return [line.partition("  #")[0].strip() for line in body]
