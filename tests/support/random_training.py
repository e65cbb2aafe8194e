"""Train a random model on simulated ranks and by a plain loop of torch, and compare everything that they share."""

from __future__ import annotations

import math
import random
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.capture.regions.regions import own_draws
from splitc.capture.trace.random_calls import draw_layouts
from splitc.compiled import CompiledProgram
from splitc.errors import SplitcError
from splitc.ir.program import Program, Refusal
from splitc.passes.analysis import analyse
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import part_of
from splitc.runtime.worker import Worker
from tests.support.random_models import random_case
from tests.support.random_runs import STEPS, Run, optimizer_of, random_program, run_of, schedule_of, share
from tests.support.ranks import worker_of


class Case(Protocol):
    """A model with its loss and data."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def tolerance(self) -> float: ...
    @property
    def batch_dim(self) -> Any: ...
    def batch(self, examples: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor | None]: ...
    def value(self, inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Trained:
    """losses, evaluated: of every step.  gradients: of the last update.  state: at the end.

    Where eager code draws other numbers each time it is evaluated, that is not a number.
    """

    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a seed.

    refused: why splitc did not take the model.  wrong: what differs from eager training.  crashed: an error that is no
    refusal.  of, loss: the model's kind and its loss.  seconds: of CPU.
    """

    seed: int
    run: Run | None = None
    refused: str = ""
    wrong: tuple[str, ...] = ()
    crashed: str = ""
    of: str = ""
    loss: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return not (self.refused or self.wrong or self.crashed)

    def __str__(self) -> str:
        what = self.crashed or "\n  ".join(self.wrong[:5]) or self.refused or "right"
        return f"seed {self.seed}, {self.of} with {self.loss}, {self.run}\n  {what}"


def outcome(seed: int) -> Outcome:
    """Train the model of a seed in a random way; the exceptions that are no refusals are part of what it says."""
    begin, case = time.process_time(), random_case(seed)
    found = Outcome(seed, of=type(case.model).__name__, loss=case.loss_name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _outcome(found, case)
    except SplitcError as error:
        found = replace(found, refused=f"{type(error).__name__}: {error}")
    except Exception as error:
        found = replace(found, crashed=_described(error))
    return replace(found, seconds=time.process_time() - begin)


def _outcome(found: Outcome, case: Any) -> Outcome:
    choose = random.Random(f"run {case.seed}")
    inputs, target = case.batch(4, 0)
    whole, goal = (inputs, target) if case.loss is not None else (inputs if target is None else (*inputs, target), None)
    example = Example.bind(case.model, whole, goal, case.loss)
    analysed = analyse(case.model, example)
    program, then = random_program(choose, case, example, analysed), None
    if choose.random() < 0.35:
        then = random_program(choose, case, example, analysed, program.plan.global_batch)
    run = run_of(choose, case, program, then)
    if isinstance(refusal := program.program.evaluation, Refusal):
        return replace(found, run=run, refused=f"evaluation: {refusal.why}")
    try:
        return replace(found, run=run, wrong=differences(case, program, run, then))
    except SplitcError as error:
        return replace(found, run=run, refused=f"while it trains: {type(error).__name__}: {error}")
    except Exception as error:
        return replace(found, run=run, crashed=_described(error))


def _described(error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"


def differences(case: Case, program: CompiledProgram, run: Run, then: CompiledProgram | None = None) -> tuple[str, ...]:
    """What differs between the training of a program on ranks and the plain loop.  then: goes on after half the steps.

    It goes on from a checkpoint.
    """
    legs = [(program, 0, STEPS)]
    if then is not None:
        legs = [(program, 0, STEPS // 2), (then, STEPS // 2, STEPS)]
    sizes = [run.sizes[step] or leg.plan.local_batches for leg, first, last in legs for step in range(first, last)]
    options = {"clip_norm": run.clip_norm, "accumulate": run.accumulate, "seed": case.seed}
    before, ranks = Trained([], [], {}, {}), list[tuple[Worker, Trained]]()
    with tempfile.TemporaryDirectory() as folder:
        for leg, first, last in legs:

            def train(transport: Any, leg: Any = leg, steps: range = range(first, last)) -> tuple[Worker, Trained]:
                worker = worker_of(leg, transport, optimizer_of(run), **options)
                return _on_rank(case, run, worker, sizes, steps, folder)

            before = ranks[0][1] if ranks else before
            ranks = run_ranks(leg.plan.world, train)
    both = [
        (worker, replace(t, losses=before.losses + t.losses, evaluated=before.evaluated + t.evaluated))
        for worker, t in ranks
    ]
    eager = _eager(case, run, [sum(each) for each in sizes], program.program)
    return tuple(_differences(both, eager, case.tolerance))


def _batches(case: Case, totals: Sequence[int]) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
    for step, total in enumerate(totals, start=1):
        yield case.batch(total, step)


def _on_rank(
    case: Case, run: Run, worker: Worker, sizes: Sequence[tuple[int, ...]], steps: range, folder: str
) -> tuple[Worker, Trained]:
    losses, evaluated = [], []
    make = schedule_of(run)
    schedule = None if make is None else worker.scheduler(make)
    if steps.start:
        worker.resume(folder)
    for step, (inputs, target) in enumerate(_batches(case, [sum(each) for each in sizes])):
        if step not in steps:
            continue
        worker.use_sizes(run.sizes[step])
        batch = inputs if target is None else (*inputs, target)
        part = share(batch, sizes[step], worker.data_rank, case.batch_dim)
        loss = worker.step(*part)
        assert not loss.requires_grad, "the loss requires a gradient"
        losses.append(float(loss))
        if schedule is not None and (step + 1) % run.accumulate == 0:
            schedule.step()
        evaluated.append(float(worker.evaluate(*part)))
    if steps.stop < len(sizes):
        worker.save(folder)
        worker.close()
    gradients = {name: gradient.to_dense().clone() for name, gradient in worker.gradients().items()}
    return worker, Trained(losses, evaluated, gradients, worker.state_dict() or {})


def _eager(case: Case, run: Run, totals: Sequence[int], program: Program) -> Trained:
    """The plain loop.  program: says only which random numbers are drawn by whom."""
    model, losses, evaluated = case.model, [], []
    optimizer = optimizer_of(run)([(name, p) for name, p in model.named_parameters()])
    make = schedule_of(run)
    schedule = None if make is None else make(optimizer)
    ends = list(accumulate(totals))
    for step, (inputs, target) in enumerate(_batches(case, totals)):
        update, position = divmod(step, run.accumulate)
        if position == 0:
            optimizer.zero_grad()
        first = ends[step - position - 1] if step > position else 0
        before = ends[step] - totals[step] - first
        draws = Draws(case.seed, update, [(before, before + totals[step])])
        with SeededRandom(draws, draw_layouts(program)), own_draws(model, program.graph):
            loss = case.value(tuple(inputs), target)
        (loss / run.accumulate).backward()
        losses.append(float(loss.detach()))
        if position == run.accumulate - 1:
            if run.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        model.eval()
        with torch.no_grad():
            value, again = (float(case.value(tuple(inputs), target)) for _ in range(2))
        evaluated.append(value if value == again else math.nan)
        model.train()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {n: p.grad.to_dense() for n, p in named if p.grad is not None}
    return Trained(losses, evaluated, gradients, model.state_dict())


def _differences(ranks: Sequence[tuple[Worker, Trained]], eager: Trained, tolerance: float) -> Iterator[str]:
    def differ(got: Any, expected: Any) -> bool:
        got, expected = torch.as_tensor(got).double(), torch.as_tensor(expected).double()
        return got.shape != expected.shape or not torch.allclose(got, expected, tolerance, tolerance, True)

    for rank, (worker, trained) in enumerate(ranks):
        for name in ("losses", "evaluated"):
            got, expected = getattr(trained, name), getattr(eager, name)
            if differ([math.nan if math.isnan(b) else a for a, b in zip(got, expected, strict=True)], expected):
                yield f"{name} of rank {rank}: {getattr(trained, name)}, eager {getattr(eager, name)}"
        for name, gradient in trained.gradients.items():
            expected = eager.gradients.get(name)
            if expected is None or differ(gradient, part_of(expected, worker.shards.get(name))):
                yield f"gradient of {name} on rank {rank}"
    found = {name for _, trained in ranks for name in trained.gradients}
    for name in eager.gradients.keys() - found:
        yield f"no rank has a gradient of {name}"
    state = ranks[0][1].state
    if state.keys() != eager.state.keys():
        yield f"keys of the state: {sorted(state.keys() ^ eager.state.keys())}"
    for name in state.keys() & eager.state.keys():
        if differ(state[name], eager.state[name]):
            yield f"state {name}"
