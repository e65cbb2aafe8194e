"""Checkpoints of training in rounds: saving ends a round, and from there training goes on bit for bit."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.compiled import CompiledProgram
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import after, assert_equal, steps
from tests.support.compiled import compiled
from tests.support.ranks import adam, on_workers, part_of, sgd
from tests.support.run_state import run_state
from tests.support.sampling import along
from tests.support.subnet_networks import CLASSES, INPUTS, Chain

STRATEGIES = {
    "independent_subnets(local_steps=2)": 3,
    "local_sgd(period=4, fragments=2, delay=1, mixing=0.5, outer_lr=0.7, outer_momentum=0.9)": 3,
    "modulo_shard(mp=2, period=2)": 4,
    "independent_subnets(local_steps=4)": 2,
    "local_sgd(period=2)": 2,
    "local_sgd(period=4, outer_lr=0.7, outer_momentum=0.9)": 2,
}
"""Strategy -> ranks."""


@cache
def planned(strategy: str) -> CompiledProgram:
    torch.manual_seed(2)
    model = Chain(7, 6, 9)
    return compiled(model, *batch(4), F.cross_entropy, STRATEGIES[strategy], strategy)


def batch(examples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, INPUTS), torch.randint(CLASSES, (examples,))


def own(worker: Worker, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return part_of(worker, whole, [b - a for a, b in pairwise(worker.rank.spec.batch_offsets)])


@pytest.mark.slow
@along(1, strategy=STRATEGIES, before=[5, 3, 4, 5], optimizer=[adam, sgd, adam])
def test_saving_and_exporting_end_a_round_and_training_goes_on_from_there(
    strategy: str, before: int, optimizer: Any, tmp_path: Path
) -> None:
    program = planned(strategy)
    batches = [batch(program.plan.global_batch) for _ in range(before + 6)]

    def at_once(worker: Worker) -> Any:
        steps(worker, batches[:before])
        worker.save(tmp_path / "run")
        return run_state(worker), go_on(worker)

    def resumed(worker: Worker) -> Any:
        steps(worker, batches[:1])  # which is forgotten
        assert worker.resume(tmp_path / "run") == before
        return run_state(worker), go_on(worker)

    def go_on(worker: Worker) -> Any:
        evaluated = [float(worker.evaluate(*own(worker, batches[0])))]
        losses = steps(worker, batches[before:])
        worker.export(tmp_path / "model.pt")
        whole = worker.state_dict()
        if whole is not None:
            assert_equal(torch.load(tmp_path / "model.pt", weights_only=True), whole)
        return after(worker, [*evaluated, *losses, float(worker.evaluate(*own(worker, batches[1])))])

    expected = on_workers(program, at_once, optimizer=optimizer)
    assert_equal(on_workers(program, resumed, optimizer=optimizer), expected)
