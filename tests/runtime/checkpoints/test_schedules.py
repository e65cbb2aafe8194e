"""Schedules go on under other plans with the rates of one process: what they hold of groups follows the groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal
from tests.support.compiled import compiled
from tests.support.ranks import on_workers, part_of
from tests.support.run_state import run_state
from tests.support.sampling import along

EXAMPLES = 12

PLANS: dict[str, tuple[str, int, dict[str, str]]] = {
    "early cut": ("layer_separation(n_c=2, n_f=1)", 3, {"0": "conv", "[245]*": "fc"}),
    "late cut": ("layer_separation(n_c=1, n_f=1)", 2, {"[024]*": "conv", "5*": "fc"}),
    "data_parallel": ("data_parallel", 2, {}),
    "modulo_shard": ("modulo_shard(mp=2)", 2, {}),
    "servers": ("parameter_server(servers=1)", 3, {}),
    "beside": ("parameter_server(servers=2, beside=True)", 2, {}),
}


@cache
def program(plan: str) -> CompiledProgram:
    strategy, world, pins = PLANS[plan]
    x, y = torch.randn(EXAMPLES // 2, 6), torch.randint(3, (EXAMPLES // 2,))
    options: dict[str, Any] = {"pins": pins} if pins else {}
    return compiled(model(), (x,), y, F.cross_entropy, world, strategy, global_batch=EXAMPLES, **options)


def model() -> nn.Sequential:
    torch.manual_seed(2)
    tail = nn.Sequential(nn.ReLU(), nn.Linear(6, 3))
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6), tail)


def layerwise(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A group for the trunk, one for the middle, one for the head, and what no layer has."""
    named, groups = list(params), []
    for k, starts in enumerate((("0.",), ("2.", "4."), ("5.",), ("7.",))):
        groups.append({"params": [p for name, p in named if name.startswith(starts)], "lr": 0.3 * 0.4**k})
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.5)


def rate(group: int, step: int) -> float:
    return 0.9 - 0.2 * group


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of groups": lambda o: schedules.LambdaLR(o, [partial(pow, 0.9 - 0.2 * k) for k in range(3)]),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, [partial(rate, k) for k in range(3)]),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 9),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=[0.2, 0.01, 0.02]),
    "one cycle": lambda o: schedules.OneCycleLR(o, [0.4, 0.2, 0.1], total_steps=20, cycle_momentum=True),
    "cyclic": lambda o: schedules.CyclicLR(o, [0.1, 0.05, 0.01], [0.4, 0.2, 0.1], step_size_up=3),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.2, total_iters=4), schedules.CosineAnnealingWarmRestarts(o, 3)], [3]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ExponentialLR(o, 0.9), schedules.MultiplicativeLR(o, lambda step: 0.8)]
    ),
}


CHAINS = [
    ("early cut", "late cut", "data_parallel"),
    ("late cut", "early cut", "beside"),
    ("modulo_shard", "servers", "beside"),
]


@cache
def batches() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(7)
    return [(torch.randn(EXAMPLES, 6), torch.randint(3, (EXAMPLES,))) for _ in range(9)]


def advance(scheduler: Any, loss: float) -> None:
    scheduler.step(*([loss > 0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))


def one_process(kind: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about SequentialLR
        plain = model()
        optimizer = layerwise(plain.named_parameters())
        scheduler, losses = SCHEDULES[kind](optimizer), []
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(plain(x), y)
            loss.backward()
            optimizer.step()
            advance(scheduler, float(loss.detach()))
            losses.append(float(loss.detach()))
    return losses


def train(worker: Worker, kind: str, first: int, last: int, folder: Path) -> list[float]:
    scheduler = worker.scheduler(SCHEDULES[kind])
    if first:
        assert worker.resume(folder) == first
    sizes = [b - a for a, b in pairwise(worker.rank.spec.batch_offsets)]
    losses = []
    for batch in batches()[first:last]:
        losses.append(float(worker.step(*part_of(worker, batch, sizes))))
        advance(scheduler, losses[-1])
    worker.save(folder)
    return losses


@pytest.mark.slow
@along(1, kind=SCHEDULES, chain=CHAINS)
def test_rates_of_groups_go_on_under_other_plans(kind: str, chain: tuple[str, ...], tmp_path: Path) -> None:
    expected, got = one_process(kind), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for k, plan in enumerate(chain):
            make = partial(train, kind=kind, first=3 * k, last=3 * k + 3, folder=tmp_path / "run")
            ranks = on_workers(program(plan), make, optimizer=layerwise)
            assert all(each == ranks[0] for each in ranks)
            got += ranks[0]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-5, atol=1e-5)


# -- other groups ------------------------------------------------------------------------------------------------------


def joined(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def without_head(params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.optim.SGD([p for name, p in params if not name.startswith("5.")], lr=0.1)


@pytest.mark.slow
def test_groups_that_cannot_be_matched_are_refused_before_anything_changes(tmp_path: Path) -> None:
    cases = [
        (layerwise, "LambdaLR", joined, "LambdaLR", "has 0.weight in group 1 of 3, this run in group 1 of 1"),
        (layerwise, "cosine", layerwise, "LambdaLR", "the checkpoint has CosineAnnealingLR, this run LambdaLR"),
        (layerwise, "sequential", layerwise, "chained", r"has SequentialLR\(LinearLR, .*\), this run ChainedScheduler"),
        (without_head, "cosine", layerwise, "cosine", "has 0.weight in group 1 of 1, this run in group 1 of 3"),
    ]
    for k, (before, kind, after, other, problem) in enumerate(cases):
        folder = tmp_path / str(k)

        def refused(worker: Worker, other: str = other, folder: Path = folder, problem: str = problem) -> None:
            worker.scheduler(SCHEDULES[other])
            state = run_state(worker)
            with pytest.raises(LaunchError, match=problem):
                worker.resume(folder)
            assert_equal(run_state(worker), state)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            on_workers(program("late cut"), partial(train, kind=kind, first=0, last=1, folder=folder), optimizer=before)
            on_workers(program("data_parallel"), refused, optimizer=after)
