"""Train a random model on simulated ranks and by a plain loop of torch, and compare everything that they share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from splitc.capture.example import Example
from splitc.capture.random_calls import draw_layouts
from splitc.capture.regions import own_draws
from splitc.compiled import CompiledProgram, Settings, compile_example
from splitc.errors import PlacementError, SplitcError
from splitc.ir.placements import Placement
from splitc.ir.program import Program
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.weights import part_of
from splitc.runtime.worker import Worker
from tests.support.compiled import CLUSTER
from tests.support.random_models import RandomCase, random_case
from tests.support.ranks import part_of as share_of
from tests.support.ranks import worker_of

STEPS = 4
STRATEGIES = (
    *("data_parallel", "data_parallel(all_reduce=recursive_doubling)", "late_multiply", "hybrid_single", "auto"),
    *("layer_separation", "modulo_shard(mp=2)", "modulo_shard(mp=2, scheme=B)", "modulo_shard(mp=2, scheme=BK)"),
    *("parameter_server(servers=1)", "parameter_server(servers=2, beside=True)", "mixed"),
)


class Case(Protocol):
    """A model with its loss and data."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def tolerance(self) -> float: ...
    def batch(self, examples: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]: ...
    def value(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Run:
    """How a model is trained.  sizes: the readers' examples of every step; None: as compiled."""

    strategy: str
    world: int
    global_batch: int | None
    pins: Mapping[str, str | Placement]
    optimizer: str
    accumulate: int
    clip_norm: float | None
    sizes: tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Trained:
    """losses, evaluated: of every step.  gradients: of the last update.  state: at the end."""

    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a seed.  refused: why splitc did not take the model.  wrong: what differs from eager training."""

    seed: int
    run: Run | None = None
    refused: str = ""
    wrong: tuple[str, ...] = ()


def outcome(seed: int) -> Outcome:
    """Train the model of a seed in a random way."""
    case, choose = random_case(seed), random.Random(f"run {seed}")
    try:
        program, run = _compiled(case, choose)
    except SplitcError as error:
        return Outcome(seed, refused=f"{type(error).__name__}: {error}")
    if isinstance(why := program.program.evaluation, str):
        return Outcome(seed, refused=why)
    return Outcome(seed, run, wrong=differences(case, program, run))


def differences(case: Case, program: CompiledProgram, run: Run) -> tuple[str, ...]:
    """What differs between the training of a program on ranks and the plain loop."""
    options = {"clip_norm": run.clip_norm, "accumulate": run.accumulate, "seed": case.seed}
    ranks = run_ranks(
        run.world, lambda transport: _on_rank(case, run, worker_of(program, transport, _optimizer(run), **options))
    )
    eager = _eager(case, run, program.plan.local_batches, program.program)
    return tuple(_differences(ranks, eager, case.tolerance))


def random_run(choose: random.Random, program: CompiledProgram) -> Run:
    """A way to train a compiled program: an optimizer, batches that differ in size, accumulation, clipping."""
    plan, sizes, optimizer = program.plan, _sizes(choose, program), choose.choice(_OPTIMIZERS)
    accumulated, clip = choose.choice([1, 1, 2]), choose.choice([None, None, 0.5])
    return Run(plan.strategy, plan.world, plan.global_batch, {}, optimizer, accumulated, clip, sizes)


_OPTIMIZERS = ("sgd", "adam")


def _sizes(choose: random.Random, program: CompiledProgram) -> tuple[tuple[int, ...] | None, ...]:
    """The readers' examples of every step: as compiled, or some more."""
    compiled = program.plan.local_batches
    return tuple(
        None if choose.random() < 0.5 else tuple(size + choose.randint(0, 3) for size in compiled) for _ in range(STEPS)
    )


def _compiled(case: RandomCase, choose: random.Random) -> tuple[CompiledProgram, Run]:
    """A program of the first random plan that is possible for the model; data_parallel is the last."""
    inputs, target = case.batch(4, 0)
    whole, goal = ((*inputs, target), None) if case.loss is None else (inputs, target)
    example = Example.bind(case.model, whole, goal, case.loss)
    world = choose.randint(2, 4)
    strategies = [*choose.sample(STRATEGIES, 3), "data_parallel"]
    accumulated, clip = choose.choice([1, 1, 2]), choose.choice([None, None, 0.5])
    for strategy in strategies:
        pins: dict[str, Any] = {}
        if strategy == "mixed":
            linears = [n for n, m in case.model.named_modules() if type(m) is nn.Linear and m.weight.requires_grad]
            pins = {
                n: choose.choice([Placement(sync="late_multiply"), Placement(holding="sharded", group=2)])
                for n in linears
                if choose.random() < 0.5
            }
            pins["head"] = Placement(role="fc") if choose.random() < 0.5 else Placement(sync="all_reduce")
        name = strategy
        if strategy == "layer_separation" and choose.random() < 0.7:
            first = choose.randint(1, world - 1)
            name = f"layer_separation(n_c={first}, n_f={world - first})"
        if case.normalises_the_batch:
            name = f"{name[:-1]}, sync_batchnorm=True)" if "(" in name else f"{name}(sync_batchnorm=True)"
        batch = choose.choice([None, None, 4 * world + 1])
        try:
            program = compile_example(case.model, example, Settings(world, batch, CLUSTER, name, pins))
        except PlacementError as error:
            refused = error
            continue
        sizes, optimizer = _sizes(choose, program), choose.choice(_OPTIMIZERS)
        return program, Run(name, world, batch, pins, optimizer, accumulated, clip, sizes)
    raise refused


def _optimizer(run: Run) -> Any:
    if run.optimizer == "adam":
        return lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01, eps=1e-3)
    return lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _batches(case: Case, sizes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Tensor, ...]]:
    for step, each in enumerate(sizes, start=1):
        inputs, target = case.batch(sum(each), step)
        yield *inputs, target


def _on_rank(case: Case, run: Run, worker: Worker) -> tuple[Worker, Trained]:
    compiled = tuple(
        b - a for a, b in zip(worker.rank.spec.batch_offsets, worker.rank.spec.batch_offsets[1:], strict=False)
    )
    losses, evaluated = [], []
    for own, sizes in zip(_batches(case, [s or compiled for s in run.sizes]), run.sizes, strict=True):
        worker.use_sizes(sizes)
        share = share_of(worker, own, sizes or compiled)
        losses.append(float(worker.step(*share)))
        evaluated.append(float(worker.evaluate(*share)))
    gradients = {name: gradient.clone() for name, gradient in worker.gradients().items()}
    return worker, Trained(losses, evaluated, gradients, worker.state_dict() or {})


def _eager(case: Case, run: Run, compiled: tuple[int, ...], program: Program) -> Trained:
    """The plain loop.  program: says only which random numbers are drawn by whom."""
    model, losses, evaluated = case.model, [], []
    optimizer = _optimizer(run)([(name, p) for name, p in model.named_parameters()])
    sizes = [s or compiled for s in run.sizes]
    ends = list(accumulate(sum(each) for each in sizes))
    for step, (*inputs, target) in enumerate(_batches(case, sizes)):
        update, position = divmod(step, run.accumulate)
        if position == 0:
            optimizer.zero_grad()
        first = ends[step - position - 1] if step > position else 0
        before = ends[step] - sum(sizes[step]) - first
        draws = Draws(case.seed, update, [(before, before + sum(sizes[step]))])
        with SeededRandom(draws, draw_layouts(program)), own_draws(model, program.graph):
            loss = case.value(tuple(inputs), target)
        (loss / run.accumulate).backward()
        losses.append(float(loss.detach()))
        if position == run.accumulate - 1:
            if run.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip_norm)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            evaluated.append(float(case.value(tuple(inputs), target)))
        model.train()
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    return Trained(losses, evaluated, gradients, model.state_dict())


def _differences(ranks: Sequence[tuple[Worker, Trained]], eager: Trained, tolerance: float) -> Iterator[str]:
    def differ(got: Any, expected: Any) -> bool:
        got, expected = torch.as_tensor(got).double(), torch.as_tensor(expected).double()
        return got.shape != expected.shape or not torch.allclose(got, expected, rtol=tolerance, atol=tolerance)

    for rank, (worker, trained) in enumerate(ranks):
        for name in ("losses", "evaluated"):
            if differ(getattr(trained, name), getattr(eager, name)):
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
