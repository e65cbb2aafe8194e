"""A run goes on under other strategies and on other numbers of ranks with the losses that it would have had."""

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
from tests.support.compiled import compiled
from tests.support.every_strategy import Small, images
from tests.support.ranks import assert_same, on_workers, part_of
from tests.support.sampling import along, sampled

EXAMPLES = 24
"""The fixed global batch."""

PLANS = {
    "data_parallel": 2,
    "layer_separation(n_c=3, n_f=1)": 4,
    "late_multiply": 3,
    "modulo_shard(mp=2)": 6,
    "modulo_shard(mp=3,scheme=B)": 3,
    "parameter_server(servers=1)": 3,
    "parameter_server(servers=2, beside=True)": 2,
    "hybrid_single": 4,
    "layer_separation(n_c=1, n_f=2)": 3,
}
"""Strategy -> ranks."""


@cache
def program(strategy: str) -> CompiledProgram:
    torch.manual_seed(3)
    model = Small(drop=0.5)
    data, target = images(EXAMPLES // 2)
    return compiled(model, (data,), target, F.cross_entropy, PLANS[strategy], strategy, global_batch=EXAMPLES)


@cache
def batches() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(9)
    return [images(EXAMPLES) for _ in range(20)]


def adamw(params: Any) -> torch.optim.Optimizer:
    named = list(params)
    decayed = [each for each in named if each[1].dim() > 1]
    groups: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in named if p[1].dim() == 1]}]
    return torch.optim.AdamW(groups, lr=0.02)


def train(
    worker: Worker, first: int, last: int, folder: Path | None = None, resumed: bool = False, asynchronous: bool = False
) -> tuple[list[float], dict[str, Tensor] | None]:
    """Batches `first` to `last - 1`, with a scheduler that steps after each update; the checkpoint is in `folder`."""
    scheduler = worker.scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
    if resumed:
        assert folder is not None
        assert worker.resume(folder) == first
    sizes = [b - a for a, b in pairwise(worker.rank.spec.batch_offsets)]
    losses = []
    for batch in batches()[first:last]:
        losses.append(float(worker.step(*part_of(worker, batch, sizes))))
        if worker.steps % 2 == 0:
            scheduler.step()
    if folder is not None:
        worker.save(folder, asynchronous=asynchronous)
        worker.close()
    return losses, worker.state_dict()


@cache
def uninterrupted() -> tuple[list[float], dict[str, Tensor] | None]:
    return run("data_parallel", 0, 8)


def run(strategy: str, first: int, last: int, *arguments: Any, **options: Any) -> Any:
    batches()  # before the ranks, which are threads, ask for them
    found = on_workers(
        program(strategy), lambda w: train(w, first, last, *arguments, **options), optimizer=adamw, accumulate=2, seed=5
    )
    assert all(losses == found[0][0] for losses, _ in found)
    return found[0]


@pytest.mark.slow
@along(1, strategy=list(PLANS)[::2], half=[6, 5])
def test_twelve_batches_are_some_a_checkpoint_and_the_others_bit_for_bit(
    strategy: str, half: int, tmp_path: Path
) -> None:
    """After 5 batches one waits for its update."""
    losses, state = run(strategy, 0, 12)
    first, _ = run(strategy, 0, half, tmp_path / "run")
    second, last = run(strategy, half, 12, tmp_path / "run", resumed=True)
    assert first + second == losses
    assert state is not None
    assert last is not None
    assert all(torch.equal(last[name], state[name]) for name in state)


MOVES = [(before, list(PLANS)[(k + 4) % len(PLANS)]) for k, before in enumerate(PLANS)]
"""A checkpoint has one form whatever wrote it: each plan writes one and reads another."""


@pytest.mark.slow
@sampled(("before", "after"), MOVES, one_in=9)
def test_any_strategy_goes_on_from_any_other(before: str, after: str, tmp_path: Path) -> None:
    expected, state = uninterrupted()
    assert state is not None
    losses, _ = run(before, 0, 4, tmp_path / "run")
    more, last = run(after, 4, 8, tmp_path / "run", resumed=True)
    torch.testing.assert_close(torch.tensor(losses + more), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert_same(last, state, 1e-4)


@pytest.mark.slow
def test_other_global_batches_are_told(tmp_path: Path) -> None:
    data, target = images(6)
    other = compiled(Small(drop=0.5), (data,), target, F.cross_entropy, 2, "data_parallel")
    run("data_parallel", 0, 2, tmp_path / "run")

    def resumed(worker: Worker) -> None:
        if worker.rank.index:
            worker.resume(tmp_path / "run")
            return
        with pytest.warns(UserWarning, match="global batches of 24 examples, and this run has 12"):
            worker.resume(tmp_path / "run")

    on_workers(other, resumed, optimizer=adamw, accumulate=2, seed=5)
