"""Compare the training of a compiled program with that of one process: loss, gradients and parameters.

One process means the user's own model and loss, eager, on the concatenated global batch.  Both draw the same dropout
masks and random numbers.  BatchNorm normalises over the groups of examples that the ranks form, replayed call by call.

In float64 three whole steps are compared, to 1e-9: this proves the algebra.  In float32 a rounding error that flips one
ReLU grows a thousandfold in the steps after it, in one process as on many ranks; so each step of the one process starts
from the parameters that the ranks have reached, and each step's loss, gradients and update are compared, to 1e-5.  A
model that computes in float32 inside is compared so too.  On GPUs float32 is not rounded to TF32 here.  Under autocast
both sides run under it, and the tolerance is 2e-2: each rank rounds its part of a gradient to 8 bits, one process
rounds the whole.

A plan that trains in rounds is approximate: it is compared with its units trained in turn in one process, and joined
after each round of at most two updates (`rounds/`), in float32 from where the ranks begin each round.

A plan whose numbers travel in short formats is approximate too, and never holds: each step is compared from where the
ranks are, in any precision, and is *bounded* where all errors are within that of its formats (`short_wire.bound`).

Rounding can be magnified (BatchNorm over few examples, squeeze and excitation), in one process as on many ranks; so an
error may also be four times that of the one process against the same step in float64 without autocast.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitc.capture.example.example import LOSS, Example
from splitc.capture.source_lines import first_line
from splitc.capture.validate.generic_data import Draw
from splitc.cost_models.compute.clocks import threads
from splitc.ir.graph import info
from splitc.ir.program import LoweredProgram, PlacedProgram, TensorSpec
from splitc.ir.regions import regions
from splitc.ir.short_wire import bound, wire_text
from splitc.ir.wire import wire
from splitc.runtime.launch.trial import Trial, ieee_float32, run_trial, torchrun_trial
from splitc.runtime.transport.simulated import run_ranks
from splitc.verify.batches import draw_batches, split_batch, within_example
from splitc.verify.comparison import TOLERANCES, Comparison, zero_gradients
from splitc.verify.features import joint_of
from splitc.verify.norm_groups import norm_groups
from splitc.verify.reference import exact_reference, loss_of_copy, reference
from splitc.verify.replay import LEARNING_RATE, MOMENTUM, Training
from splitc.verify.rounding import rounding

_BATCHES = 4  # on which rounding is measured
_SHOWN = 5  # gradients of an approximate plan, the worst ones


@dataclass(frozen=True)
class Verification:
    """What `verify` measured.  Errors are relative (L2); `worst` names the tensor with the largest one.

    holds: all errors are within `tolerance`, and the ranks train as one process does.  bounded: where numbers travel in
    short formats, which is approximate, all errors are within the bound that these formats have.
    parameters: of such plans, what rounding does to each gradient, the worst first (`rounding.py`).
    steps, examples: how much was trained.  where: the node to look at.  against: what was trained beside the ranks.
    """

    holds: bool
    loss_error: float
    gradient_error: float
    parameter_error: float
    tolerance: float
    worst: str
    steps: int
    examples: int
    dtype: str
    processes: bool
    notes: tuple[str, ...] = ()
    where: str = ""
    against: str = "one process"
    bounded: bool = False
    parameters: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """What was found, in a word."""
        return "holds" if self.holds else "approximate, bounded" if self.bounded else "DOES NOT HOLD"

    def __str__(self) -> str:
        lines = [
            f"{self.verdict}: {self.steps} steps of {self.examples} examples in "
            f"{self.dtype} on {'processes' if self.processes else 'simulated ranks'} against {self.against}",
            f"  loss error       {self.loss_error:.2e}",
            f"  gradient error   {self.gradient_error:.2e}",
            f"  parameter error  {self.parameter_error:.2e}",
            f"  tolerance        {self.tolerance:.0e}   worst: {self.worst}",
        ]
        for name, (error, cosine, noise) in [*self.parameters.items()][:_SHOWN]:
            figures = f"relative error {error:.2e}, cosine {cosine:.6f}, noise of a batch {noise:.2e}"
            lines.append(f"  approximate      {name}: {figures}")
        if self.where:
            lines.append(f"  look at          {self.where}")
        return "\n".join([*lines, *(f"  note             {note}" for note in self.notes)])


@ieee_float32()
def verify_program(
    program: LoweredProgram,
    files: Mapping[str, str],
    model: nn.Module,
    example: Example,
    weights: Mapping[str, Any],
    local_batches: Sequence[int],
    *,
    processes: bool,
    steps: int,
    seed: int,
    compile_stages: bool | str = False,
) -> Verification:
    """Compare `steps` training steps of the generated `files` with `model` trained in this process.

    example: one reader's batch, like which all batches are drawn.  local_batches: examples of each reader in a step.
    """
    local_batches = within_example(program, tuple(local_batches))
    world, size = program.plan.world, sum(local_batches)
    period = joint_of(program).period(program.plan)
    steps = max(steps, 2 * period + 1) if program.plan.trains_in_units else steps
    batches, how = draw_batches(program, example, size, steps, seed, partial(loss_of_copy, program, model, example))
    feeds = [split_batch(program, batch, local_batches) for batch in batches]
    precision, is_exact = computed_in(program), program.plan.wire.is_exact
    allowed = 0.0 if is_exact else bound(op for rank in range(world) for op in wire(program, rank))
    own = {"model": model, LOSS: example.loss}
    options = local_batches, LEARNING_RATE, MOMENTUM, period, compile_stages
    if processes:
        with tempfile.TemporaryDirectory() as folder:
            trials = torchrun_trial(Path(folder), files, weights, world, feeds, *options)
    else:
        with threads(max(1, torch.get_num_threads() // world)):  # ranks are threads too, and compete for cores
            trials = run_ranks(world, lambda t: run_trial(files, t, weights, feeds, *options, own))
    notes = [] if how is Draw.GENERIC else [f"trained on {how.text}, since the model does not run on generic data"]
    training = Training(program, model, example, batches, local_batches, period)
    exact: Sequence[Trial | None] = [None] * world
    if precision == torch.float64 and is_exact:
        expected = reference(training)
    else:
        training = replace(training, states=next(trial.states for trial in trials if trial.states))
        expected = reference(training)
        try:
            exact = exact_reference(training)
        except Exception as error:
            notes.append(f"rounding was not measured, since the model does not run in float64 ({first_line(error)})")
    units = sorted({program.plan.unit(rank) for rank in range(world)})
    tolerance, own_errors = max(TOLERANCES.get(precision, 1e-5), allowed), exact if is_exact else [None] * world
    comparisons = [
        Comparison([trials[rank] for rank in unit], expected[k], own_errors[k], tolerance)
        for k, unit in enumerate(units)
    ]
    zero = set.intersection(*({*()} if each is None else zero_gradients(each) for each in exact))
    found = None if is_exact else rounding(program, model, example, weights, local_batches, _BATCHES)
    if found is not None:
        notes.append(f"with {wire_text(program.plan.wire)} rounding {found.added} of {size} examples")
    result = _verification(training, comparisons, zero, processes, notes)
    return replace(result, parameters=found.effects) if found else result


def computed_in(program: PlacedProgram) -> torch.dtype:
    """The coarsest dtype that values with a gradient are computed in: what rounds most decides the tolerance."""
    if program.autocast is not None:
        return program.autocast
    found = {tensor.dtype for tensor in program.tensors.values() if tensor.trainable}
    found |= {dtype for _, own in regions(program) for dtype in own.dtypes}
    for node in program.graph.nodes:
        spec = info(node).spec
        each = spec if isinstance(spec, tuple) else (spec,)
        found |= {part.dtype for part in each if isinstance(part, TensorSpec) and part.requires_grad}
    return max({_REAL.get(dtype, dtype) for dtype in found}, key=lambda dtype: torch.finfo(dtype).eps)


_REAL = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


def _verification(
    training: Training, comparisons: Sequence[Comparison], zero: set[str], processes: bool, notes: Sequence[str]
) -> Verification:
    """The largest errors over all units and steps, without the gradients in `zero`."""
    program, local_batches = training.program, training.local_batches
    first, tolerance = comparisons[0], comparisons[0].tolerance
    dtype = next(tensor.dtype for tensor in program.tensors.values() if tensor.trainable)
    loss_error = max(each.loss_error(step) for each in comparisons for step in each.steps)
    gradients = _largest(each.gradient_errors(step) for each in comparisons for step in each.steps)
    gradients = {name: error for name, error in gradients.items() if name not in zero}
    parameters = _largest(each.state_errors(step) for each in comparisons for step in each.steps)
    errors = {f"{name} (gradient)": e for name, e in gradients.items()}
    errors |= {f"{name} (value)": e for name, e in parameters.items()}
    gradient_error, parameter_error = max(gradients.values(), default=0.0), max(parameters.values(), default=0.0)
    within, is_short = max(loss_error, gradient_error, parameter_error) <= tolerance, not program.plan.wire.is_exact
    notes = [*_notes(program, local_batches, zero), *notes, *_rounding(comparisons, zero)]
    units = joint_of(program).what
    against = "one process" + f" that trains {len(comparisons)} {units} in turn and averages them" * bool(units)
    if not within and program.plan.exact and first.exact is None and dtype != torch.float64:
        notes.append("it may be rounding, which BatchNorm over few examples magnifies: --dtype float64 shows whether")
    return Verification(
        within and not is_short,
        loss_error,
        gradient_error,
        parameter_error,
        tolerance,
        worst=max(errors, key=lambda name: errors[name], default=""),
        steps=len(first.steps),
        examples=sum(local_batches),
        dtype=" under autocast to ".join(str(d).removeprefix("torch.") for d in (dtype, program.autocast) if d),
        processes=processes,
        notes=tuple(notes),
        where="" if within else _suspect(program, comparisons),
        against=against,
        bounded=within and is_short,
    )


def _rounding(comparisons: Sequence[Comparison], zero: set[str]) -> Iterator[str]:
    """Say what rounding does to the one process, where that allows for more than the tolerance."""
    own = _largest(each.rounding(step) for each in comparisons for step in each.steps)
    worst = max(own.keys() - zero, key=lambda name: own[name], default="")
    if worst and 4 * own[worst] > comparisons[0].tolerance:
        yield (
            f"rounding alone changes gradients of the one process by up to {own[worst]:.1e} ({worst}), and errors are "
            f"measured by four times that; --dtype float64 proves the algebra"
        )


def _largest(steps: Iterator[dict[str, float]]) -> dict[str, float]:
    """The largest error of each name over the steps."""
    found: dict[str, float] = {}
    for errors in steps:
        for name, error in errors.items():
            found[name] = max(found.get(name, 0.0), error)
    return found


def _notes(program: LoweredProgram, local_batches: Sequence[int], zero: set[str]) -> Iterator[str]:
    plan = program.plan
    every = any(group.updates == "every" for group in plan.groups.values())
    if plan.trains_in_units or every:
        within = f"its ranks train by themselves within a {plan.cycle}, which"
        why = within if plan.trains_in_units else "an update in every microbatch"
        yield f"this plan is approximate: {why} is not the training of one process"
    if text := wire_text(plan.wire):
        yield f"this plan is approximate: {text} on the wire, each step within a bound of one process"
    yield from joint_of(program).notes(plan)
    if (whole := plan.global_batch) > sum(local_batches):
        yield f"with {sum(local_batches)} of the plan's {whole} examples a step, in its proportions"
    if zero:
        yield f"left out, because their gradient is zero but for rounding: {', '.join(sorted(zero))}"
    calls = norm_groups(program, local_batches, range(plan.world))
    if groups := {tuple(len(group.rows) for group in call) for call in calls if len(call) > 1}:
        listed = "; ".join("+".join(map(str, g)) for g in sorted(groups))
        yield f"BatchNorm normalises over each rank's examples, as under DDP: groups of {listed}"


def _suspect(program: PlacedProgram, comparisons: Sequence[Comparison]) -> str:
    """Where the ranks begin to differ: in the first step that differs, the last layer with a wrong gradient.

    Backward comes from there; a loss that differs is named too.
    """
    if any(group.updates == "every" for group in program.plan.groups.values()):
        return "updates=every, which makes this plan approximate by design; updates=once is exact"
    for step, comparison in product(comparisons[0].steps, comparisons):
        tolerance, errors = comparison.tolerance, comparison.gradient_errors(step)
        missing = {name for name in errors if not any(name in trial.gradients[step] for trial in comparison.ranks)}
        if layers := [layer for layer in program.layers if missing.intersection(layer.tensors)]:
            return f"layer {layers[-1].name} ({layers[-1].source}): no rank has its gradient"
        wrong = {name for name, error in errors.items() if error > tolerance} - missing
        layers = [layer for layer in program.layers if wrong.intersection(layer.tensors)]
        parts = [f"layer {layers[-1].name} ({layers[-1].source})"] if layers else []
        if comparison.loss_error(step) > tolerance:
            terms = " and ".join(term.node for term in program.loss_terms)
            parts.append(f"the loss {terms} ({info(program.loss).source})")
        if parts:
            factor = comparison.gradient_factor(layers[-1].tensors, step) if layers else None
            gradient = "" if factor is None else f": its gradient is {factor:.4g} times that of one process"
            return f"{' and '.join(parts)}{gradient}"
    ends = f" or the end of a {program.plan.cycle}" * program.plan.trains_in_units
    return f"the optimizer{ends}: loss and gradients are right, the parameters are not"
