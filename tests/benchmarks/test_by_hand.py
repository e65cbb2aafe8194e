"""The scripts that are written by hand train as one process does, or what splitc is compared with is not the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.session import Session
from benchmarks.session_rank import sgd
from examples import recommender
from tests.benchmarks.by_hand_rank import batches, clicks, tables, undropped
from tests.benchmarks.testbeds import OnLoopback
from tests.support.forked import as_executable

pytestmark = [pytest.mark.processes, pytest.mark.from_scratch, pytest.mark.slow]

STEPS, TOTAL, RATE = 3, 12, 0.1
SCRIPTS = [("ddp", {}), ("late_multiply", {}), ("rows", {}), *(("separation", {"microbatches": m}) for m in (1, 4))]


@pytest.fixture(scope="module")
def session(forking: Path) -> Iterator[Session]:
    with as_executable(forking), OnLoopback(3) as testbed, Session(testbed, "tests.benchmarks.by_hand_rank") as session:
        yield session  # three ranks divide neither 1024 features nor 1000 classes


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    model = undropped()
    optimizer = sgd(model.parameters(), RATE)
    for images, labels in batches(TOTAL, STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("script", "options"), SCRIPTS)
def test_a_script_by_hand_moves_every_weight_as_one_process_does(
    session: Session, alone: dict[str, torch.Tensor], script: str, options: dict[str, int], tmp_path: Path
) -> None:
    file = tmp_path / "weights.pt"
    session.do("train", script=script, options=options, total=TOTAL, steps=STEPS, rate=RATE, file=str(file))
    moves_alike(torch.load(file), alone, undropped().state_dict())


@pytest.mark.parametrize("script", ["ddp", "sparse_ddp"])
def test_tables_move_as_in_one_process_whether_their_gradients_are_sparse_or_not(
    session: Session, script: str, tmp_path: Path
) -> None:
    file, model = tmp_path / "weights.pt", tables()
    optimizer = sgd(model.parameters(), RATE, 0.0)
    for *inputs, target in clicks(TOTAL, STEPS):
        optimizer.zero_grad()
        recommender.loss(model(*inputs), target).backward()
        optimizer.step()
    session.do("train_tables", script=script, total=TOTAL, steps=STEPS, rate=RATE, file=str(file))
    moves_alike(torch.load(file), model.state_dict(), tables().state_dict())


def moves_alike(
    trained: dict[str, torch.Tensor], alone: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> None:
    assert trained.keys() == alone.keys()
    for name, weight in alone.items():
        moved = weight - before[name]
        assert moved.abs().max() > 0
        assert (trained[name] - weight).abs().max() <= 1e-9 * moved.abs().max(), name
