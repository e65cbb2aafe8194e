"""A run's checkpoints are its own: another run neither replaces them nor goes on from them unasked."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.errors import LaunchError
from splitc.runtime.checkpoints import storage
from splitc.runtime.checkpoints.run import tell
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import batches_of, small, steps
from tests.support.ranks import on_workers
from tests.support.sampling import along

FOREIGN = "was written by another run, which would lose it; go on from it with resume, or give another folder"


def trained(folder: Path, number: int, resume: bool = False) -> Callable[[Worker], None]:
    def run(worker: Worker) -> None:
        if resume:
            worker.resume(folder)
        steps(worker, batches_of(small(), number))
        worker.save(folder)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@along(number=[2, 1, 3], asynchronous=[False, True])
def test_a_run_that_did_not_resume_leaves_the_checkpoints_of_another_alone(
    number: int, asynchronous: bool, tmp_path: Path
) -> None:
    on_workers(small(), trained(tmp_path, 2))
    before = contents(tmp_path)

    def run(worker: Worker) -> None:
        steps(worker, batches_of(small(), number))
        with pytest.raises(LaunchError, match=f"step-000002 {FOREIGN}"):
            worker.save(tmp_path, asynchronous=asynchronous)
            worker.close()

    on_workers(small(), run)
    assert contents(tmp_path) == before
    assert on_workers(small(), lambda worker: worker.resume(tmp_path)) == [2, 2]


@pytest.mark.slow
def test_a_run_goes_on_in_its_folder_under_another_plan_and_in_others(tmp_path: Path) -> None:
    on_workers(small(), trained(tmp_path / "a", 1))
    on_workers(small("late_multiply"), trained(tmp_path / "a", 1, resume=True))
    on_workers(small(), trained(tmp_path / "a", 1, resume=True))

    def moved(worker: Worker) -> None:
        assert worker.resume(tmp_path / "a") == 3
        worker.save(tmp_path / "b")
        steps(worker, batches_of(small(), 1))
        worker.save(tmp_path / "a")
        worker.save(tmp_path / "b")

    on_workers(small(), moved)
    assert on_workers(small(), lambda worker: worker.resume(tmp_path / "b")) == [4, 4]


def test_of_two_processes_that_go_on_from_one_checkpoint_the_second_is_told(tmp_path: Path) -> None:
    on_workers(small(), trained(tmp_path, 1))

    def run(worker: Worker) -> None:
        worker.resume(tmp_path)
        steps(worker, batches_of(small(), 1))
        worker._transport.barrier()
        if worker.rank.index == 0:
            on_workers(small(), trained(tmp_path, 3, resume=True))
        worker._transport.barrier()
        with pytest.raises(LaunchError, match=f"step-000004 {FOREIGN}"):
            worker.save(tmp_path)

    on_workers(small(), run)
    assert on_workers(small(), lambda worker: worker.resume(tmp_path)) == [4, 4]


def test_of_two_runs_that_begin_in_one_folder_at_once_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one finds an empty folder, and completes its checkpoint while the first one writes."""
    real: Any = storage.write
    first = threading.Event()

    def write(disks: Any, *arguments: Any) -> None:
        if not first.is_set():
            disks.transport.barrier()
            first.set()
            if disks.transport.rank == 0:
                on_workers(small(), trained(tmp_path, 1))
            disks.transport.barrier()
        real(disks, *arguments)

    def run(worker: Worker) -> None:
        steps(worker, batches_of(small(), 2))
        monkeypatch.setattr("splitc.runtime.checkpoints.run.write", write)
        worker._transport.barrier()
        with pytest.raises(LaunchError, match=f"no checkpoint was written:\n  - step-000001 {FOREIGN}"):
            worker.save(tmp_path)

    on_workers(small(), run)
    assert on_workers(small(), lambda worker: worker.resume(tmp_path)) == [1, 1]


def test_a_folder_with_checkpoints_of_several_runs_is_resumed_by_name_alone(tmp_path: Path) -> None:
    on_workers(small(), trained(tmp_path / "a", 1))
    on_workers(small(), trained(tmp_path / "b", 2))
    shutil.copytree(tmp_path / "b" / "step-000002", tmp_path / "a" / "step-000002")

    def run(worker: Worker) -> int:
        with pytest.raises(LaunchError, match=r"holds step-\d+ and step-\d+ of different runs; name the one to resume"):
            worker.resume(tmp_path / "a")
        made = worker.resume(tmp_path / "a" / "step-000001")
        with pytest.raises(LaunchError, match=f"step-000002 {FOREIGN}"):
            worker.save(tmp_path / "a")
        return made

    assert on_workers(small(), run) == [1, 1]


def test_disks_with_checkpoints_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    def folder(worker: Worker, name: str) -> Path:
        return tmp_path / name / f"host{worker.rank.index}"

    def written(name: str) -> None:
        def run(worker: Worker) -> None:
            steps(worker, batches_of(small(), 1))
            worker.save(folder(worker, name))

        on_workers(small(), run)

    written("a")
    written("b")
    shutil.rmtree(tmp_path / "a" / "host1")
    shutil.copytree(tmp_path / "b" / "host1", tmp_path / "a" / "host1")

    def run(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="of different runs"):
            worker.resume(folder(worker, "a"))

    on_workers(small(), run)


def test_a_disk_that_is_full_is_told_at_once_and_nothing_of_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672]")

    monkeypatch.setattr("splitc.runtime.checkpoints.storage.FileSystemWriter.write_data", full)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))

    def run(worker: Worker) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            worker.save(tmp_path)
        return caught.value

    errors = on_workers(small(), run)
    title = f"{tmp_path}: no checkpoint was written (its disk is full: 0 MB are left):"
    assert {str(error).splitlines()[0] for error in errors} == {title}
    assert list(tmp_path.iterdir()) == []
    writing: Future[None] = Future()
    writing.add_done_callback(tell)  # as the thread of an asynchronous checkpoint does
    writing.set_exception(errors[0])
    assert capsys.readouterr().err.startswith(title) and writing.done()
