"""Buffers that count steps: every rank and role that reads one has its value of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from tests.support.compiled import compiled
from tests.support.models import CLASSES, labels, made, vectors
from tests.support.ranks import assert_same, on_workers, one_process, train
from tests.support.sampling import along, sampled
from tests.support.untraceable import sign

Run = Callable[[Any, Tensor], Tensor]


def read_in_the_head(m: Any, x: Tensor) -> Tensor:
    m.steps += 1
    h = m.a(x)
    return m.fc(m.b(h) * m.steps)


def read_before_and_after(m: Any, x: Tensor) -> Tensor:
    before = 1 * m.steps
    m.steps.add_(1).mul_(1.5)
    h = m.a(x) * before
    return m.fc(m.b(h) * m.steps)


def read_nowhere(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1)
    return m.fc(m.b(m.a(x)))


RUNS = [read_in_the_head, read_before_and_after, read_nowhere]
STRATEGIES: dict[str, int] = {"layer_separation": 3, "data_parallel": 2, "modulo_shard(scheme=B/K)": 4}


def counting(run: Run, strategy: str) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(0)
    children = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "fc": nn.Linear(8, CLASSES)}
    model = made(run, **children, steps=nn.Buffer(torch.ones(())))
    pins = {"a": "trunk", "b": "head", "fc": "head"} if strategy == "layer_separation" else {}
    program = compiled(model, vectors()(), labels()(), F.cross_entropy, STRATEGIES[strategy], strategy, pins=pins)
    return model, program


@pytest.mark.slow
@along(2, run=RUNS, strategy=STRATEGIES)
def test_a_counter_counts_each_step_once_on_every_rank_that_reads_it(run: Run, strategy: str) -> None:
    model, program = counting(run, strategy)
    size = program.plan.global_batch
    batches = [(torch.randn(size, 8), torch.randint(CLASSES, (size,))) for _ in range(4)]
    losses, state = on_workers(program, lambda worker: train(worker, batches), accumulate=2)[0]
    expected, own = one_process(copy.deepcopy(model), batches, accumulate=2)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same(state, own, 1e-4)


class Counting(nn.Module):
    """Code that cannot be traced, which counts its calls and reads the number."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.steps = nn.Linear(8, 8), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return sign(self.fc(x)) * self.steps.sqrt()


OWN = {
    "layer_separation(ranks=2+1, microbatches=2)": 3,
    "hybrid_single(microbatches=2)": 2,
    "modulo_shard(scheme=B/K)": 2,
    "data_parallel": 2,
}


def own_counter(strategy: str) -> tuple[nn.Module, CompiledProgram]:
    torch.manual_seed(0)
    model = made(lambda m, x: m.fc(m.b(m.b(m.a(x)))), a=nn.Linear(8, 8), b=Counting(), fc=nn.Linear(8, CLASSES))
    x, y = vectors()(), labels()()
    return model, compiled(model, x, y, F.cross_entropy, OWN[strategy], strategy)


@pytest.mark.slow
@sampled("strategy", OWN, one_in=4)
def test_a_counter_in_own_code_counts_as_in_one_process_whatever_the_microbatches(strategy: str) -> None:
    model, program = own_counter(strategy)
    size = program.plan.global_batch
    batches = [(torch.randn(size, 8), torch.randint(CLASSES, (size,))) for _ in range(3)]
    losses, state = on_workers(program, lambda worker: train(worker, batches))[0]
    expected, own = one_process(copy.deepcopy(model), batches)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same(state, own, 1e-4)
