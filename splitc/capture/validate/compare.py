"""Compare runs of a captured graph with runs of its model: loss, gradients, buffers, and state that Python keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.capture.source_lines import first_line, line_of
from splitc.capture.validate.apart import EXAMPLES, NotFinite
from splitc.capture.validate.gradients import Gradients, differing, gradients
from splitc.capture.validate.python_state import changed, is_tensor_state, python_state
from splitc.capture.validate.reference_copy import Precision, ReferenceCopy
from splitc.errors import CaptureError
from splitc.ir.comm_ops import store_buffer
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner
from splitc.ir.program import Program
from splitc.ir.regions import is_inside, regions
from splitc.runtime.weights import named_tensors


class Fails(Exception):
    """The model does not run on what was drawn, or differs from its graph beyond what was allowed."""


def compare(
    program: Program, model: nn.Module, example: Example, batches: list[dict[str, Tensor]], may_widen: bool
) -> list[str]:
    """Compare the model with its graph: bit by bit, else in float64, else up to rounding; return notes.

    Raises CaptureError where they differ, Fails where the model fails.
    """
    first = ""
    for precision in Precision if may_widen else (Precision.EXACT, Precision.OWN):
        try:
            compare_runs(program, ReferenceCopy(program, model, example, precision), batches)
        except CaptureError as error:
            if precision is Precision.OWN:
                raise
            first = str(error)
        except Fails:
            if precision is not Precision.WIDE:
                raise
        else:
            return [] if precision is not Precision.OWN else [f"Compared without float64, in which {first}."]
    raise AssertionError("the last precision returns or raises")


def compare_runs(program: Program, reference: ReferenceCopy, batches: list[dict[str, Tensor]]) -> None:
    """Run the model and its graph on one batch, and again on another one.  Raises CaptureError where they differ."""
    keeps = {name for _, own in regions(program) for name in own.keeps}
    before = python_state(reference.model, reference.example.loss)
    expected, own_gradients = _model_run(program, reference, batches[0])
    state = python_state(reference.model, reference.example.loss)
    got, captured = _graph_run(program, reference, batches[0])
    _require_equal(program, expected, got, reference.tolerance, changed(before, state))
    for name in differing(own_gradients, captured, reference.tolerance):
        raise CaptureError(
            f"the gradient of {name} differs between the model and its captured graph: something between {name} "
            f"and the loss has a backward of its own; write it with torch operations"
        )
    for batch in (batches[1], batches[1]):
        expected, _ = _model_run(program, reference, batch, backward=False)
        before, state = state, python_state(reference.model, reference.example.loss)
        names = [n for n in changed(before, state) if not any(is_inside(n.partition("[")[0], k) for k in keeps)]
        _refuse_counting(reference, [n for n in names if not is_tensor_state(state.get(n, before.get(n)))])
        got, _ = _graph_run(program, reference, batch, backward=False)
        _require_equal(program, expected, got, reference.tolerance, names)
        if not names:
            break
    else:
        _refuse_counting(reference, names)  # the same batch twice: they depend on what came before
    _require_same_buffers(reference)


def _model_run(
    program: Program, reference: ReferenceCopy, tensors: Mapping[str, Tensor], backward: bool = True
) -> tuple[Tensor, Gradients]:
    try:
        loss = reference.loss(reference.values(tensors))
    except CaptureError:
        raise
    except Exception as error:
        where = line_of(error) or type(reference.model).__name__
        raise Fails(
            f"{where}: the model fails on {EXAMPLES} examples of its batch: {type(error).__name__}: {error}"
        ) from error
    if not bool(loss.isfinite()):
        raise NotFinite(
            f"{info(program.loss).source}: the loss is not finite on the example; give an example on which it is"
        )
    return loss.detach(), gradients(program, reference.root, loss) if backward else {}


class _Run(NodeRunner):
    """Notes which buffers get which values."""

    def __init__(self, reference: ReferenceCopy, program: Program) -> None:
        super().__init__(reference.root, program.graph)
        self.stored: list[tuple[Any, ...]] = []

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is store_buffer:
            self.stored.append(args)
        return super().call_function(target, args, kwargs)


def _graph_run(
    program: Program, reference: ReferenceCopy, tensors: Mapping[str, Tensor], backward: bool = True
) -> tuple[Tensor, Gradients]:
    runner = _Run(reference, program)
    try:
        with reference.running():
            loss: Tensor = runner.run_named(reference.values(tensors))
    except Exception as error:
        raise CaptureError(f"the captured graph fails where the model runs: {first_line(error)}") from error
    found = gradients(program, reference.root, loss) if backward else {}
    with torch.no_grad():
        for buffer, value in runner.stored:
            buffer.copy_(value)
    return loss.detach(), found


def _require_equal(program: Program, own: Tensor, captured: Tensor, allowed: float, names: Sequence[str]) -> None:
    if torch.allclose(own, captured, rtol=allowed, atol=allowed / 100, equal_nan=True):
        return
    advice = "begin it anew in each batch, or .detach() it and keep it in an attribute of the module that reads it"
    where = f" ({', '.join(names[:4])} changed; {advice})" if names else ""
    raise CaptureError(
        f"the captured graph computes a loss of {captured.item():.10g} where the model computes {own.item():.10g}: "
        f"{program.name} does something that a graph cannot hold, such as reading what an earlier call left behind"
        f"{where}, or numbers from a generator of its own"
    )


def _refuse_counting(reference: ReferenceCopy, names: list[str]) -> None:
    if names:
        raise CaptureError(
            f"every call of {type(reference.model).__name__} changes {', '.join(names[:6])}, and a graph would keep "
            f"what it was in one call; count outside of forward, or in a buffer that forward only adds to "
            f"(self.steps.add_(1)); draw from torch, random or numpy.random themselves, which are seeded alike on ranks"
        )


def _require_same_buffers(reference: ReferenceCopy) -> None:
    captured = dict(named_tensors(reference.root))
    for name, buffer in named_tensors(reference.model).items():
        other = captured.get(name)
        if other is None or other is buffer:
            continue
        if buffer.shape != other.shape or not torch.allclose(buffer, other, rtol=reference.tolerance, equal_nan=True):
            kind = "parameter" if isinstance(buffer, nn.Parameter) else "buffer"
            raise CaptureError(f"the {kind} {name} differs between the model and its captured graph after some runs")
