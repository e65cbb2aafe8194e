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
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.models import CLASSES, labels, made, vectors
from tests.support.ranks import assert_same, on_workers, one_process, part_of, train

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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_counter_counts_each_step_once_on_every_rank_that_reads_it(run: Run, strategy: str) -> None:
    model, program = counting(run, strategy)
    size = program.plan.global_batch
    batches = [(torch.randn(size, 8), torch.randint(CLASSES, (size,))) for _ in range(4)]
    losses, state = on_workers(program, lambda worker: train(worker, batches), accumulate=2)[0]
    expected, own = one_process(copy.deepcopy(model), batches, accumulate=2)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same(state, own, 1e-4)


def test_evaluation_does_not_count() -> None:
    _, program = counting(read_in_the_head, "layer_separation")
    size = program.plan.global_batch
    batch = (torch.randn(size, 8), torch.randint(CLASSES, (size,)))

    def evaluated_twice(worker: Worker) -> list[float]:
        own = part_of(worker, batch, program.plan.local_batches)
        return [float(worker.evaluate(*own)) for _ in range(2)]

    first, second = on_workers(program, evaluated_twice)[0]
    assert first == second
