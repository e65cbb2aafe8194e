"""Show that a compiled program is the same training as one process: run both, compare loss, gradients and parameters.

One process means the user's own model and loss, eager, on the concatenated global batch.  Dropout is off on both
sides, and BatchNorm normalises over the groups that the ranks form, replayed call by call (design 4).

In float64 three whole steps are compared, to 1e-9: this proves the algebra.  In float32 a rounding error that turns
one ReLU the other way grows a thousandfold in the steps after it, in one process as in many; so there every step of
the one process starts from the parameters that the ranks have reached, and what is compared is each step's own loss,
gradients and update.

A program under autocast is compared so with the model under the same autocast, to 2e-2: each rank rounds its part of a
gradient to eight bits, where one process rounds the whole.  BatchNorm can make of such an error many times its size, in
one process too: an error may also be 1.5 times that of the one process, of what float64 gives without autocast, as two
independent roundings of the same number differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from splitc.capture.capture import Loss
from splitc.ir import comm_ops
from splitc.ir.program import PlacedProgram, Program
from splitc.runtime.launch.trial import Trial, run_trial, torchrun_trial
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import part_of
from splitc.verify.reference import LEARNING_RATE, MOMENTUM, in_double, norm_groups, reference

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_OWN_ERROR = 1.5 / TOLERANCES[torch.bfloat16]  # makes 1.5 times autocast's own error the largest that is allowed


@dataclass(frozen=True)
class Verification:
    """What `verify` measured.  Errors are relative (L2); `worst` names the tensor with the largest one.

    holds: all errors are within `tolerance`.  steps, examples: how much was trained.  where: the node to look at.
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

    def __str__(self) -> str:
        lines = [
            f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.steps} steps of {self.examples} examples in "
            f"{self.dtype} on {'processes' if self.processes else 'simulated ranks'} against one process",
            f"  loss error       {self.loss_error:.2e}",
            f"  gradient error   {self.gradient_error:.2e}",
            f"  parameter error  {self.parameter_error:.2e}",
            f"  tolerance        {self.tolerance:.0e}   worst: {self.worst}",
        ]
        if self.where:
            lines.append(f"  look at          {self.where}")
        return "\n".join([*lines, *(f"  note             {note}" for note in self.notes)])


def verify_program(
    program: PlacedProgram,
    files: Mapping[str, str],
    model: nn.Module,
    loss: Loss,
    weights: Mapping[str, Any],
    example: Mapping[str, Tensor],
    processes: bool,
    steps: int,
    sizes: Sequence[int] | None,
    seed: int,
) -> Verification:
    """Compare `steps` training steps of the generated `files` with `model` trained in this process.

    example: the program's inputs by name, one reader's batch; further data is drawn from it.  sizes: examples that each
    reader gives to a step.
    """
    plan = program.plan
    sizes = tuple(sizes) if sizes is not None else plan.local_batches
    batches = [_global_batch(example, sum(sizes), seed + step) for step in range(steps)]
    names = [i.name for i in program.inputs]
    feeds = [[tuple(part[name] for name in names) for part in _split(batch, sizes)] for batch in batches]
    dtype = next(h.dtype for h in program.tensors.values() if h.trainable)
    if processes:
        with tempfile.TemporaryDirectory() as folder:
            trials = torchrun_trial(Path(folder), files, weights, plan.world, feeds, sizes, LEARNING_RATE, MOMENTUM)
    else:
        with _threads(max(1, torch.get_num_threads() // plan.world)):
            trials = run_ranks(
                plan.world, lambda t: run_trial(files, t, weights, feeds, sizes, LEARNING_RATE, MOMENTUM)
            )
    states = next(trial.states for trial in trials if trial.states)
    expected = reference(program, model, loss, batches, sizes, [] if dtype == torch.float64 else states)
    if dtype == torch.float64:
        return _compare(program, expected, trials, states, set(), dtype, sizes, processes)
    exact = in_double(program, model, loss, batches if program.autocast else batches[:1], sizes, states)
    zero = _zero_by_mathematics(exact)
    return _compare(
        program, expected, trials, states, zero, dtype, sizes, processes, exact if program.autocast else None
    )


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Torch's threads for each operation: simulated ranks are threads themselves, more of them fight for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- data --------------------------------------------------------------------------------------------------------------


def _global_batch(example: Mapping[str, Tensor], number: int, seed: int) -> dict[str, Tensor]:
    """`number` examples drawn from the example's rows; floats get some noise so that no two are the same."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, next(iter(example.values())).shape[0], (number,), generator=generator)

    def draw(tensor: Tensor) -> Tensor:
        chosen = tensor.detach().cpu()[rows]
        if not tensor.dtype.is_floating_point:
            return chosen
        noise = torch.randn(chosen.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        return chosen + noise * chosen.std().nan_to_num(1.0)

    return {name: draw(tensor) for name, tensor in example.items()}


def _split(batch: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    parts = {name: tensor.split(list(sizes)) for name, tensor in batch.items()}
    return [{name: parts[name][k] for name in batch} for k in range(len(sizes))]


# -- comparison --------------------------------------------------------------------------------------------------------


def _errors(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """|a - b| / max(|b|, 1e-3 rms(all) sqrt(numel)) of every tensor, L2; infinities must be equal (a mask's, say).

    exact: under autocast, what b would be without rounding; 75 |b - exact| is then a third size to measure by.
    """
    wide = {name: b.double().nan_to_num(0.0, 0.0, 0.0) for name, b in expected.items()}
    numel = sum(b.numel() for b in wide.values())
    rms = (sum(float(b.square().sum()) for b in wide.values()) / max(numel, 1)) ** 0.5
    out = {}
    for name, b in wide.items():
        if name not in got:
            out[name] = float("inf")
            continue
        a = got[name]
        difference = float(torch.where(a == expected[name], 0.0, a.double() - b).norm())
        floor = 1e-3 * rms * b.numel() ** 0.5
        if exact is not None:
            floor = max(floor, _OWN_ERROR * float((b - exact[name].double()).norm()))
        out[name] = difference / max(float(b.norm()), floor) if difference else 0.0
        if out[name] != out[name]:
            out[name] = float("inf")
    return out


def _zero_by_mathematics(exact: Trial) -> set[str]:
    """Parameters whose gradient is zero but for rounding: a bias before BatchNorm, an attention key bias."""
    zero = set(exact.gradients[0])
    for gradients in exact.gradients:
        sizes = {name: float(g.norm()) / g.numel() ** 0.5 for name, g in gradients.items()}
        zero &= {name for name, size in sizes.items() if size <= 1e-10 * max(sizes.values())}
    return zero


def _gradient_errors(trial: Trial, expected: Trial, exact: Trial | None) -> dict[str, float]:
    """The largest error of each gradient over the steps, of those, or of their parts, that the trial's rank holds."""
    worst: dict[str, float] = {}
    for step, (got, whole) in enumerate(zip(trial.gradients, expected.gradients, strict=True)):
        wanted = _parts(whole, trial)
        unrounded = None if exact is None else _parts(exact.gradients[step], trial)
        for name, error in _errors({**wanted, **got}, wanted, unrounded).items():
            if name in got:
                worst[name] = max(worst.get(name, 0.0), error)
    return worst


def _parts(whole: Mapping[str, Tensor], trial: Trial) -> dict[str, Tensor]:
    """Those parts of whole tensors that the trial's rank holds."""
    return {name: part_of(tensor, trial.shares.get(name)) for name, tensor in whole.items()}


def _state_errors(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None
) -> dict[str, float]:
    """Errors of parameters and buffers; counters must be equal."""
    floats = {k: v for k, v in expected.items() if v.dtype.is_floating_point}
    counters = {
        k: 0.0 if k in got and torch.equal(got[k], v) else float("inf") for k, v in expected.items() if k not in floats
    }
    return {**_errors(got, floats, exact), **counters}


def _compare(
    program: PlacedProgram,
    expected: Trial,
    trials: Sequence[Trial],
    states: Sequence[Mapping[str, Tensor]],
    zero: set[str],
    dtype: torch.dtype,
    sizes: Sequence[int],
    processes: bool,
    exact: Trial | None = None,
) -> Verification:
    tolerance = TOLERANCES.get(program.autocast or dtype, 1e-5)
    by_rank = [_gradient_errors(trial, expected, exact) for trial in trials]
    gradients = {
        name: max((errors[name] for errors in by_rank if name in errors), default=float("inf"))  # inf: no rank has it
        for name in expected.gradients[0]
        if name not in zero
    }
    unrounded = [None] * len(states) if exact is None else exact.states
    by_step = [_state_errors(*each) for each in zip(states, expected.states, unrounded, strict=True)]
    parameters = {name: max(errors[name] for errors in by_step) for name in by_step[0]}
    loss_error = max(_loss_error(trial, expected, step) for trial in trials for step in range(len(expected.losses)))
    everything = {f"{n} (gradient)": e for n, e in gradients.items()} | {
        f"{n} (value)": e for n, e in parameters.items()
    }
    worst = max(everything, key=lambda n: everything[n], default="")
    gradient_error, parameter_error = max(gradients.values(), default=0.0), max(parameters.values(), default=0.0)
    holds = max(loss_error, gradient_error, parameter_error) <= tolerance
    return Verification(
        holds,
        loss_error,
        gradient_error,
        parameter_error,
        tolerance,
        worst,
        len(expected.losses),
        sum(sizes),
        " under autocast to ".join(str(d).removeprefix("torch.") for d in (dtype, program.autocast) if d),
        processes,
        (*_notes(program, sizes, zero), *(_rounding(dtype) if not holds and program.plan.exact else ())),
        "" if holds else _where(program, trials, expected, exact, tolerance),
    )


def _where(
    program: PlacedProgram, trials: Sequence[Trial], expected: Trial, exact: Trial | None, tolerance: float
) -> str:
    if not program.plan.exact:
        return "updates=every, which makes this plan approximate by design; updates=once is exact"
    return _suspect(program, trials, expected, exact, tolerance)


def _rounding(dtype: torch.dtype) -> tuple[str, ...]:
    """What else may have happened, in a precision that rounds."""
    if dtype == torch.float64:
        return ()
    return ("it may be rounding, which BatchNorm over few examples magnifies: --dtype float64 tells",)


def _notes(program: PlacedProgram, sizes: Sequence[int], zero: set[str]) -> tuple[str, ...]:
    notes = []
    if not program.plan.exact:
        notes.append("this plan is approximate: an update in every turn is not the training of one process")
    if (whole := program.plan.global_batch) > sum(sizes):
        notes.append(f"with {sum(sizes)} of the plan's {whole} examples a step, in its proportions")
    if zero:
        notes.append(f"left out, because their gradient is zero but for rounding: {', '.join(sorted(zero))}")
    if any(node.target is comm_ops.dropout for node in program.graph.nodes):
        notes.append("dropout was off on both sides")
    groups = {tuple(group.size for group in groups) for groups in norm_groups(program, sizes) if len(groups) > 1}
    if groups:
        listed = "; ".join("+".join(map(str, g)) for g in sorted(groups))
        notes.append(f"BatchNorm normalises over each rank's examples, as under DDP: groups of {listed}")
    return tuple(notes)


def _suspect(program: Program, trials: Sequence[Trial], expected: Trial, exact: Trial | None, tolerance: float) -> str:
    """Where the ranks begin to differ: in the first step that differs, the last layer with a wrong gradient.

    Backward comes from there; a loss that differs is named too.
    """
    for step, wanted in enumerate(expected.gradients):
        loss_differs = any(_loss_error(trial, expected, step) > tolerance for trial in trials)
        wrong = {
            name
            for trial in trials
            for part in [_parts(wanted, trial)]
            for unrounded in [None if exact is None else _parts(exact.gradients[step], trial)]
            for name, error in _errors({**part, **trial.gradients[step]}, part, unrounded).items()
            if error > tolerance
        }
        nobodys = {name for name in wanted if not any(name in trial.gradients[step] for trial in trials)}
        if missing := [layer for layer in program.layers if nobodys.intersection(layer.tensors)]:
            return f"layer {missing[-1].name} ({missing[-1].source}): no rank has its gradient"
        layers = [layer for layer in program.layers if wrong.intersection(layer.tensors)]
        if not layers and not loss_differs:
            continue
        parts = [f"layer {layers[-1].name} ({layers[-1].source})"] if layers else []
        if loss_differs:
            parts.append(
                f"the loss {' and '.join(term.node for term in program.loss_terms)} ({program.loss.meta['source']})"
            )
        factor = _factor(layers[-1].tensors, trials, wanted, step) if layers else None
        return " and ".join(parts) + (
            "" if factor is None else f": its gradient is {factor:.4g} times that of one process"
        )
    return "the optimizer: loss and gradients are right, the parameters are not"


def _loss_error(trial: Trial, expected: Trial, step: int) -> float:
    error = abs(trial.losses[step] - expected.losses[step]) / max(abs(expected.losses[step]), 1e-12)
    return float("inf") if error != error else error


def _factor(names: Sequence[str], trials: Sequence[Trial], wanted: Mapping[str, Tensor], step: int) -> float | None:
    """The constant by which the gradients of a layer are off, if there is one."""
    for trial in trials:
        gradients, parts = trial.gradients[step], _parts(wanted, trial)
        for name in names:
            if name in gradients and name in parts and float(parts[name].norm()):
                a, b = gradients[name].double(), parts[name].double()
                factor = float((a * b).sum() / (b * b).sum())
                constant = float((a - factor * b).norm()) <= 1e-3 * float(a.norm()) and abs(factor - 1) > 1e-4
                return factor if constant else None
    return None
