"""Analyse a model: capture its step, validate the graph, and price the layers.

In a process a model is validated once, as long as its trace, its Python state and its example stay; behind the plan,
where the caller asks for that.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from splitc.capture.batch_layouts import first_apart
from splitc.capture.capture import capture
from splitc.capture.evaluation import capture_evaluation
from splitc.capture.example.example import Example
from splitc.capture.group_layers import gather_coupled
from splitc.capture.trace.random_calls import located
from splitc.capture.validate.behind import Behind, settle
from splitc.capture.validate.parts import require_parts
from splitc.capture.validate.python_state import python_state
from splitc.capture.validate.validate import validate_capture
from splitc.cost_models.calibration.rank_timer import Progress, no_progress
from splitc.cost_models.compute.cost_cache import graph_text
from splitc.cost_models.compute.counting import OpCounter
from splitc.errors import CaptureError
from splitc.ir.comm_ops import linear_cross_entropy
from splitc.ir.disk_cache import digest_of, is_off
from splitc.ir.pass_manager import Watcher, run_pass
from splitc.ir.program import Program
from splitc.passes.count_costs import CountCosts


def analyse(
    model: nn.Module,
    example: Example,
    *,
    name: str | None = None,
    watch: Watcher | None = None,
    autocast: torch.dtype | None = None,
    code: str | None = None,
    evaluation: bool = True,
    now: Progress = no_progress,
    behind: Behind | None = None,
) -> Program:
    """Capture a model, validate the graph against it, and price its layers.

    code: see `OwnCode`.  evaluation: capture it in evaluation mode too; else it evaluates as it trains, modes switched.
    now: called with what is being done to the model, before it is.  behind: takes the validations that can wait,
    of which the program has what is expected.
    """
    settle()
    now("tracing")

    def checked(program: Program, laid_out: Example) -> Program:
        now("validating")
        return _validated(program, model, laid_out, behind)

    def captured(laid_out: Example, chunks: bool = True) -> Program:
        program = capture(model, laid_out, name, autocast, code, OpCounter, None, chunks)
        try:
            return checked(program, laid_out)
        except CaptureError:
            if not program.graph.find_nodes(op="call_function", target=linear_cross_entropy):
                raise
            return captured(laid_out, chunks=False)

    program = first_apart(example, captured)
    if program.coupled and (program.part is not None or any(each.spec.batch_dim is None for each in program.inputs)):
        raise CaptureError(
            f"as batch=, or lists, divide the examples, a rank cannot train on its part: {program.coupled[0].why}; let "
            f"the model return a row for each example, and give the loss and a target apart"
        )
    if program.part is not None:
        require_parts(program, model, example)
    program = gather_coupled(program)
    if evaluation:
        now("tracing the evaluation of")
        dims = {each.name: each.spec.batch_dim for each in program.inputs if each.spec.batch_dim != 0}
        laid_out = replace(example, batch_dims=dims)
        found = capture_evaluation(program, model, laid_out, lambda each: checked(each, laid_out))
        program = replace(program, evaluation=found)
    now("counting the layers of")
    return run_pass(CountCosts(), program, watch)


_VALIDATED: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = WeakKeyDictionary()
"""Models of this process -> the digest of what a validation follows from -> the fields of the program that it found."""


def _validated(program: Program, model: nn.Module, example: Example, behind: Behind | None) -> Program:
    """The program with what its validation found, or an earlier one of the same graph without reservations."""
    graph = None if is_off() or example.is_said else graph_text(program)
    if graph is None:
        expected = behind and behind.expect(program, model, example)
        return located(expected or validate_capture(program, model, example))
    state = python_state(model, [example.loss, dict(example.tensors)])
    kept = _VALIDATED.setdefault(model, {})
    if (key := digest_of(graph, str(dict(example.batch_dims)), repr(state))) in kept:
        return located(replace(program, **kept[key]))
    expected = behind and behind.expect(program, model, example)
    validated = expected or validate_capture(program, model, example)
    found = {each.name: getattr(validated, each.name) for each in fields(Program)}
    found = {name: value for name, value in found.items() if value != getattr(program, name)}
    if found.keys() <= {"loss_terms", "coupled", "flattened"}:  # no notes: generic data show all of it
        keep = partial(kept.__setitem__, key, found)
        behind.then(keep) if behind and expected else keep()
    return located(validated)


def fingerprint(program: Program) -> str:
    """Twelve hex digits of the captured graph and its tensors' shapes, to check that a plan was made for this model.

    The dtype of autocast is appended, `0b5c1ea77f0e-bfloat16`, so that a plan can be compiled under the same autocast.
    """
    targets = {
        n: fx.node._format_arg(n.target) if isinstance(n.target, str) else getattr(n.target, "__name__", "")
        for n in program.graph.nodes
    }
    text = [f"{n.op} {n.name} {target} {n.args} {n.kwargs}" for n, target in targets.items()]
    text += [f"{t.name} {t.shape} {t.dtype} {t.requires_grad}" for t in program.tensors.values()]
    digest = hashlib.sha256("\n".join([*text, str(program.batch)]).encode()).hexdigest()[:12]
    return digest if program.autocast is None else f"{digest}-{str(program.autocast).removeprefix('torch.')}"
