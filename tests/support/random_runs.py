"""Random ways to train a compiled program: optimizer, groups, schedule, batches, accumulation, plans that change."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.ir.program import Program
from splitc.specialise import Settings, specialise
from tests.support.compiled import CLUSTER
from tests.support.random_models import RandomCase

STEPS = 4
STRATEGIES = (
    *("data_parallel", "data_parallel(all_reduce=recursive_doubling)", "late_multiply", "hybrid_single", "auto"),
    *("layer_separation", "modulo_shard(mp=2)", "modulo_shard(mp=2, scheme=B)", "modulo_shard(mp=2, scheme=BK)"),
    *("parameter_server(servers=1)", "parameter_server(servers=2, beside=True)", "mixed"),
)


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    sizes: the readers' examples of every step; None: as compiled.  groups: parameter groups, by name; "few" leaves out
    empty ones.  schedule: of learning rates.  then: the strategy and ranks of the plan that goes on from half.
    """

    strategy: str
    world: int
    global_batch: int | None
    pins: Mapping[str, str | Placement]
    optimizer: str
    accumulate: int
    clip_norm: float | None
    sizes: tuple[tuple[int, ...] | None, ...]
    groups: str = ""
    schedule: str = ""
    then: str = ""


def random_run(choose: random.Random, program: CompiledProgram) -> Run:
    """A way to train a compiled program: an optimizer, batches that differ in size, accumulation, clipping."""
    plan, sizes, optimizer = program.plan, random_sizes(choose, program), choose.choice(_OPTIMIZERS)
    accumulated, clip = choose.choice([1, 1, 2]), choose.choice([None, None, 0.5])
    return Run(plan.strategy, plan.world, plan.global_batch, {}, optimizer, accumulated, clip, sizes)


def run_of(choose: random.Random, case: RandomCase, program: CompiledProgram, then: CompiledProgram | None) -> Run:
    """A way to train the program of a random case, with groups and schedules; `then`: the plan that goes on."""
    settings = program._settings
    sizes = random_sizes(choose, program)
    if then is not None:
        sizes = (*sizes[: STEPS // 2], *random_sizes(choose, then)[STEPS // 2 :])
    accumulate, clip = choose.choice([1, 1, 2]), choose.choice([None, None, 0.5])
    groups = choose.choice(["", "", "all", "few"])
    schedule = choose.choice(["", *_SCHEDULES]) if groups or choose.random() < 0.3 else ""
    optimizer = choose.choice(_OPTIMIZERS)
    if case.is_sparse:
        optimizer, clip = "plain sgd", None
    strategy, after = str(settings.strategy), "" if then is None else f"{then._settings.strategy} on {then.plan.world}"
    pins, batch = settings.pins, settings.global_batch
    return Run(strategy, settings.world, batch, pins, optimizer, accumulate, clip, sizes, groups, schedule, after)


def random_sizes(choose: random.Random, program: CompiledProgram) -> tuple[tuple[int, ...] | None, ...]:
    """The readers' examples of every step: as compiled, or some more; the last may be a tail."""
    compiled, smaller = program.plan.local_batches, choose.choice([0, 0, 0, 1, 2])
    sizes: list[tuple[int, ...] | None] = [
        None if choose.random() < 0.5 else tuple(size + choose.randint(0, 3) for size in compiled) for _ in range(STEPS)
    ]
    if smaller:
        sizes[-1] = tuple(max(1, size - smaller) for size in compiled)
    return tuple(sizes)


# -- plans -------------------------------------------------------------------------------------------------------------


def random_program(
    choose: random.Random, case: RandomCase, example: Example, analysed: Program, batch: int | None = None
) -> CompiledProgram:
    """A program of the first random plan that is possible; data_parallel is the last.  batch: the global one."""
    world = choose.choice([1, *[2, 3, 4] * 4])
    asked: int | None = batch or choose.choice([None, None, 4 * world + 1])
    strategies = [*(choose.sample(STRATEGIES, 3) if world > 1 else ["auto"]), "data_parallel"]
    microbatches = choose.choice([1, 1, 1, 2, 3])
    for strategy in strategies:
        pins = _pins(choose, case) if strategy == "mixed" else {}
        name = strategy
        if strategy == "layer_separation" and choose.random() < 0.7:
            first = choose.randint(1, world - 1)
            name = _with(name, f"n_c={first}, n_f={world - first}")
        if case.normalises_the_batch:
            name = _with(name, "sync_batchnorm=True")
        elif microbatches > 1 and strategy != strategies[-1]:
            name = _with(name, f"microbatches={microbatches}")
        settings = Settings(world, asked, CLUSTER, name, pins)
        try:
            return CompiledProgram(specialise(analysed, settings), case.model, example, settings)
        except PlacementError as error:
            refused = error
    raise refused


def _with(strategy: str, option: str) -> str:
    return f"{strategy[:-1]}, {option})" if strategy.endswith(")") else f"{strategy}({option})"


def _pins(choose: random.Random, case: RandomCase) -> dict[str, Any]:
    linears = [n for n, m in case.model.named_modules() if type(m) is nn.Linear and m.weight.requires_grad]
    pins: dict[str, Any] = {
        n: choose.choice([Placement(sync="late_multiply"), Placement(holding="sharded", group=2)])
        for n in linears
        if choose.random() < 0.5
    }
    if "head" in linears:
        pins["head"] = Placement(role="fc") if choose.random() < 0.5 else Placement(sync="all_reduce")
    return pins


# -- optimizers and schedules ------------------------------------------------------------------------------------------

_OPTIMIZERS = ("sgd", "adam")


def optimizer_of(run: Run) -> Any:
    """The factory of a run, which is given (name, parameter) pairs."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01, eps=1e-3),
        "plain sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    }
    make = kinds[run.optimizer]
    if not run.groups:
        return make

    def in_groups(params: Any) -> torch.optim.Optimizer:
        named = list(params)
        heads = [(n, p) for n, p in named if n.split(".")[0] in ("head", "tail", "top", "predictor", "items")]
        biases = [(n, p) for n, p in named if n.endswith("bias") and not any(n == name for name, _ in heads)]
        taken = {name for name, _ in (*heads, *biases)}
        rest = [(n, p) for n, p in named if n not in taken]
        parts: list[dict[str, Any]] = [{"params": rest}, {"params": biases, "lr": 0.02}, {"params": heads, "lr": 0.08}]
        if run.groups == "few":
            return make([each for each in parts if each["params"]])
        return make(
            [{**each, "params": [p for _, p in each["params"]]} for each in parts]
        )  # torch wants no name or all

    return in_groups


def _lambdas(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    factors = [lambda k: 0.8**k, lambda k: 1 / (1 + k), lambda k: 1 - 0.1 * k]
    number = len(optimizer.param_groups)
    return lr_scheduler.LambdaLR(optimizer, factors if number == 3 else factors[0])


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts: list[lr_scheduler.LRScheduler] = [
        lr_scheduler.LinearLR(optimizer, 0.3, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [1])


def _one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rates = [2 * group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 2)


_SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda k: 0.8**k),
    "lambdas": _lambdas,
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "sequential": _sequential,
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 1), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    ),
    "one cycle": _one_cycle,
}


def schedule_of(run: Run) -> Callable[[torch.optim.Optimizer], Any] | None:
    """The learning-rate schedule of a run, which steps after every update."""
    return _SCHEDULES.get(run.schedule)


def share(
    batch: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    reader: int | None,
    dims: int | tuple[int | None, ...] | Callable[[tuple[Tensor, ...], int, int], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """What a reader has of a global batch.  dims: of the examples, of all tensors or of each; None: it has them all.

    Or a function that takes some examples of a batch.
    """
    if reader is None:
        return ()
    if callable(dims):
        first = sum(sizes[:reader])
        return dims(batch, first, first + sizes[reader])
    of = (dims,) * len(batch) if isinstance(dims, int) else dims
    return tuple(x if dim is None else x.split(sizes, dim)[reader].clone() for x, dim in zip(batch, of, strict=True))
