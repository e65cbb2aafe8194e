"""Workers of every strategy train as one process does: optimizers, groups, schedules, clipping, accumulation, state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.transformer import next_token_loss, transformer
from splitc.compiled import CompiledProgram
from splitc.ir.program import Program
from splitc.runtime.worker import Worker
from tests.support.compiled import analyse, compiled
from tests.support.every_strategy import Asked, Small, analysed, every_strategy, images, planned
from tests.support.ranks import assert_same, on_workers, one_process, part_of, train
from tests.support.sampling import sampled

Named = list[tuple[str, nn.Parameter]]
Optimizer = Callable[[Any], torch.optim.Optimizer]

WORLD = 4
EVERY = {asked.name: asked for asked in every_strategy(WORLD)}
SOME = [
    "data_parallel(all_reduce=recursive_doubling)",
    "layer_separation(n_c=3, n_f=1)",
    "layer_separation(ranks=2+1+1)",
    "hybrid_single",
    "late_multiply of all",
    "modulo_shard(mp=2,scheme=BK)",
    "modulo_shard(mp=2,scheme=B/K)",
    "modulo_shard(mp=4,scheme=B)",
    "modulo_shard(mp=2) with rows",
    "sharded, late, one rank",
    "parameter_server",
    "parameter_server(beside=True)",
]
"""One of each kind: what is not told apart by an optimizer is left to `slow`."""


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, weight_decay=0.01)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def grouped(params: Named) -> torch.optim.Optimizer:
    """Biases without weight decay and with a rate of their own, by name."""
    biases = [p for name, p in params if name.endswith("bias")]
    weights = [p for name, p in params if not name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.3, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)


@cache
def plan_of(name: str) -> CompiledProgram:
    """In float64, so that an optimizer that divides by small gradients shows no rounding."""
    return planned(WORLD, EVERY[name], torch.float64)


def model() -> Small:
    return copy.deepcopy(analysed(torch.float64)[0])


def batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [images(4 * WORLD, torch.float64) for _ in range(number)]


def feeds(program: CompiledProgram, number: int) -> list[tuple[Tensor, Tensor]]:
    return [images(program.plan.global_batch, torch.float64) for _ in range(number)]


def assert_trains(program: CompiledProgram, optimizer: Optimizer, **options: Any) -> None:
    """Four batches on the ranks are four in one process."""
    given = feeds(program, 4)
    results = on_workers(program, lambda worker: train(worker, given), optimizer=optimizer, **options)
    losses, state = one_process(model(), given, optimizer, **options)
    assert all(got == pytest.approx(losses, rel=1e-9) for got, _ in results)
    assert_same(results[0][1], state, tolerance=1e-9)
    assert [state for _, state in results[1:]] == [None] * (program.plan.world - 1)


OPTIMIZERS = [sgd, adam, adamw, grouped]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"clip_norm": 0.05},
    {"clip_norm": 1e3},
    {"accumulate": 2, "clip_norm": 0.05},
]
CELLS = [(name, OPTIMIZERS[k % 4], OPTIONS[k % 5]) for k, name in enumerate(EVERY)]
"""Every strategy, and every optimizer with all options."""


@pytest.mark.slow
@sampled(("name", "optimizer", "options"), CELLS, one_in=6)
def test_every_strategy_trains_with_any_elementwise_optimizer(
    name: str, optimizer: Optimizer, options: dict[str, Any]
) -> None:
    """Clipping counts a parameter once however it is held; two batches to an update are the mean of their losses."""
    assert_trains(plan_of(name), optimizer, **options)


@pytest.mark.slow
@sampled("name", SOME, one_in=9)
def test_an_evaluation_is_that_of_one_process_and_leaves_training_alone(name: str) -> None:
    program = plan_of(name)
    first, aside, second = feeds(program, 3)

    def run(worker: Worker) -> tuple[float, dict[str, Tensor] | None]:
        train(worker, [first])
        loss = float(worker.evaluate(*part_of(worker, aside, program.plan.local_batches)))
        return loss, train(worker, [second])[1]

    results = on_workers(program, run, optimizer=sgd)
    whole = model()
    updates = sgd(whole.parameters())
    for k, (x, y) in enumerate((first, second)):
        updates.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        updates.step()
        if k == 0:
            expected = float(F.cross_entropy(whole(aside[0]), aside[1]).detach())
    assert all(loss == pytest.approx(expected, rel=1e-9) for loss, _ in results)
    assert_same(results[0][1], whole.state_dict(), tolerance=1e-9)


# -- states ------------------------------------------------------------------------------------------------------------


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@cache
def trained(name: str) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Two batches, and the state of the ranks after them."""
    torch.manual_seed(5)
    program = plan_of(name)
    given = feeds(program, 2)
    state = on_workers(program, lambda worker: train(worker, given), optimizer=plain_sgd)[0][1]
    assert state is not None
    return given, state


NAMES = [*EVERY]
MOVES = [(name, NAMES[(k + 5) % len(NAMES)]) for k, name in enumerate(NAMES)]
"""A state passes one form, that of the model: every strategy writes it for another, and reads that of another."""


@pytest.mark.slow
@sampled(("source", "target"), MOVES, one_in=14)
def test_a_state_moves_from_one_strategy_to_another(source: str, target: str) -> None:
    """Two steps as `source`, one as `target`, are three of one process."""
    before, state = trained(source)
    program = plan_of(target)
    after = feeds(program, 1)

    def run(worker: Worker) -> dict[str, Tensor] | None:
        worker.load_state_dict(state if worker.rank.index == 0 else None)
        return train(worker, after)[1]

    _, expected = one_process(model(), [*before, *after], plain_sgd)
    assert_same(on_workers(program, run, optimizer=plain_sgd)[0], expected, tolerance=1e-9)


@pytest.mark.slow
@sampled("name", SOME, one_in=3)
def test_a_state_of_the_models_own_loads_and_comes_back_as_it_was(name: str) -> None:
    torch.manual_seed(6)
    other = Small().double().state_dict()

    def run(worker: Worker) -> dict[str, Tensor] | None:
        worker.load_state_dict(other)
        return worker.state_dict()

    assert_same(on_workers(plan_of(name), run)[0], other, tolerance=0.0)


# -- tied weights and embeddings ---------------------------------------------------------------------------------------

LANGUAGE = [
    "data_parallel",
    "hybrid_single",
    "late_multiply",
    "layer_separation",
    "modulo_shard(mp=2,scheme=B/K)",
    "parameter_server",
    "parameter_server(servers=3,beside=True)",
    "layer_separation(ranks=2+1+1)",
]


@cache
def language(tied: bool) -> tuple[nn.Module, Any, Any, Program]:
    torch.manual_seed(7)
    built = transformer(vocabulary=31, width=8, depth=1, heads=2, time=5, tied=tied).double()
    x, y = tokens(4)
    return built, x, y, analyse(built, (x,), y, next_token_loss)


def tokens(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(31, (examples, 5)), torch.randint(31, (examples, 5))


@pytest.mark.slow
@sampled(
    ("strategy", "options"),
    [(s, {"clip_norm": 0.05, "accumulate": 2}) for s in LANGUAGE[1::2]] + [(s, {}) for s in LANGUAGE],
    one_in=10,
)
def test_embeddings_and_tied_weights_train_as_in_one_process(strategy: str, options: dict[str, Any]) -> None:
    """Under two names a weight is one parameter: of the mean over batches, and of the global norm."""
    built, x, y, known = language(tied := bool(options) or strategy in LANGUAGE[-2:])
    program = compiled(built, (x,), y, next_token_loss, 4, strategy, analysed=known)
    given = [tokens(program.plan.global_batch) for _ in range(4)]
    results = on_workers(program, lambda worker: train(worker, given), optimizer=adamw, **options)
    losses, state = one_process(copy.deepcopy(built), given, adamw, next_token_loss, **options)
    assert results[0][0] == pytest.approx(losses, rel=1e-9)
    assert_same(results[0][1], state, tolerance=1e-9)
    assert not tied or torch.equal(state["head.weight"], state["tokens.weight"])


@sampled("asked", [a for a in every_strategy(2) if "modulo" in a.strategy or a.strategy == "auto"], one_in=9)
def test_parameters_are_named_and_shaped_as_each_rank_holds_them(asked: Asked) -> None:
    """Under the model's own names; of a divided layer a rank has its part, and all parts make it up."""
    program = planned(2, asked)

    def run(worker: Worker) -> dict[str, int]:
        return {name: p.numel() for name, p in worker.stage.named_parameters()}

    held: Iterable[dict[str, int]] = on_workers(program, run)
    whole = {name: p.numel() for name, p in Small().named_parameters()}
    for name, numel in whole.items():
        parts = [each[name] for each in held if name in each]
        assert sum(parts) == numel or set(parts) == {numel}, name
