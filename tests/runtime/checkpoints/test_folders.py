"""Checkpoints on disks of the ranks' own: each file is on two of them, and a lost disk gets everything again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from splitc.errors import LaunchError
from splitc.runtime.checkpoints.folders import find_disks, steps_in
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal, batches_of, small, steps
from tests.support.ranks import on_ranks, on_workers
from tests.support.run_state import run_state
from tests.support.sampling import along

FOLDERS: dict[str, Callable[[Path, int], Path]] = {
    "one disk": lambda path, rank: path / "run",
    "two disks": lambda path, rank: path / f"host{rank // 2}" / "run",
    "a disk each": lambda path, rank: path / f"host{rank}" / "run",
}


@pytest.mark.parametrize(("where", "disks"), [("one disk", 1), ("two disks", 2), ("a disk each", 3)])
def test_ranks_that_see_the_same_folder_share_a_disk(where: str, disks: int, tmp_path: Path) -> None:
    def run(transport: Transport) -> list[int]:
        found = find_disks(transport, FOLDERS[where](tmp_path, transport.rank))
        transport.barrier()
        assert not list(found.folder.iterdir())
        return list(found.of)

    of = on_ranks(3, run)
    assert of == [of[0]] * 3
    assert len(set(of[0])) == disks


@along(where=FOLDERS, strategy=["layer_separation(n_c=2, n_f=1)", "late_multiply"], lost=[0, 1, 2])
def test_losing_a_disk_loses_nothing(where: str, strategy: str, lost: int, tmp_path: Path) -> None:
    program = small(strategy, 3)
    batches = batches_of(program, 4)
    folder = FOLDERS[where]

    def saved(worker: Worker) -> Any:
        steps(worker, batches[:2])
        worker.save(folder(tmp_path, worker.rank.index))
        return steps(worker, batches[2:]), run_state(worker)

    def resumed(worker: Worker) -> Any:
        assert worker.resume(folder(tmp_path, worker.rank.index)) == 2
        return steps(worker, batches[2:]), run_state(worker)

    expected = on_workers(program, saved)
    if where != "one disk":
        shutil.rmtree(folder(tmp_path, lost))
    assert_equal(on_workers(program, resumed), expected)
    files = [sorted(path.name for path in folder(tmp_path, rank).glob("step-*/*")) for rank in range(3)]
    assert files[1:] == files[:-1]
    assert {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} <= {*files[0]}


@pytest.mark.slow
def test_the_last_ones_are_kept_and_those_of_a_future_that_was_given_up_are_set_aside(tmp_path: Path) -> None:
    def run(worker: Worker) -> None:
        for _ in range(4):
            steps(worker, batches_of(small(), 1))
            worker.save(tmp_path, keep=3)
        worker._transport.barrier()
        assert sorted(steps_in(tmp_path)) == [2, 3, 4]
        assert worker.resume(tmp_path / "step-000002") == 2
        steps(worker, batches_of(small(), 1))
        worker.save(tmp_path, keep=2)
        assert worker.resume(tmp_path) == 3
        with pytest.raises(LaunchError, match="keep=0: give the number of checkpoints"):
            worker.save(tmp_path, keep=0)

    on_workers(small(), run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000004.superseded"]


@pytest.mark.slow
def test_no_rank_goes_on_while_another_removes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = shutil.rmtree

    def slow(path: Path, **options: Any) -> None:
        for file in sorted(path.iterdir()):  # the manifest first
            file.unlink()
        time.sleep(0.1)
        removed(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)

    def run(worker: Worker) -> None:
        for worker._steps in range(1, 5):  # no step between two saves makes the ranks meet
            worker.save(tmp_path, keep=1)
        worker.resume(tmp_path)

    on_workers(small(), run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004"]


def test_a_checkpoint_that_cannot_be_removed_is_told_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(path: Path, **_: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    def run(worker: Worker) -> str:
        worker.save(tmp_path)
        steps(worker, batches_of(small(), 1))
        with pytest.raises(LaunchError) as caught:
            worker.save(tmp_path, keep=1)
        return str(caught.value)

    monkeypatch.setattr(shutil, "rmtree", stuck)
    for text in on_workers(small(), run):
        assert "step-000001: written, but the checkpoints before it could not be removed" in text
    assert sorted(steps_in(tmp_path)) == [0, 1]


def test_objects_without_a_state_or_with_one_that_is_code_are_refused_by_name(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"layer": torch.nn.Linear(1, 1)}

        def load_state_dict(self, state: Any) -> None:
            return

    def run(worker: Worker) -> str:
        with pytest.raises(LaunchError, match="counter: a int has no state_dict"):
            worker.register(counter=3)
        worker.register(odd=Odd())
        with pytest.raises(LaunchError) as caught:
            worker.save(tmp_path / "run")
        return str(caught.value)

    assert all("Linear: a checkpoint holds numbers, texts" in text for text in on_workers(small(), run))
