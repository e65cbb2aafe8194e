"""Copies in the memory of hosts: a lost host takes along no more than the steps since the last of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from splitc.errors import LaunchError
from splitc.runtime.checkpoints.folders import METADATA
from splitc.runtime.checkpoints.manifest import MANIFEST
from splitc.runtime.launch.options import copies_every
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_other_plans import PLANS, adamw, batches, program
from tests.runtime.checkpoints.test_resume import assert_equal, batches_of, small, steps
from tests.support.ranks import assert_same, on_workers
from tests.support.run_state import run_state


def on_hosts(worker: Worker, path: Path) -> Path:
    """Give each rank a host of its own; returns what is its memory."""
    worker._checkpoints.memory = path / f"host{worker.rank.index}"
    worker._checkpoints.memory.mkdir(exist_ok=True)
    return worker._checkpoints.memory


SMALLER = {
    "layer_separation(n_c=3, n_f=1)": "layer_separation(n_c=1, n_f=2)",
    "modulo_shard(mp=3,scheme=B)": "parameter_server(servers=2, beside=True)",
    "late_multiply": "data_parallel",
}
"""Strategy -> the one of a world without the last rank's host."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SMALLER)
def test_a_lost_host_loses_nothing_that_was_copied_and_fewer_ranks_go_on(strategy: str, tmp_path: Path) -> None:
    given, lost = batches(), PLANS[strategy] - 1

    def copied(worker: Worker) -> Any:
        on_hosts(worker, tmp_path)
        steps(worker, given[:1])
        worker.save(tmp_path / "disk")
        steps(worker, given[1:3])
        before = worker.rank.transport.sent_bytes
        worker.neighbour_copy()
        sent = worker.rank.transport.sent_bytes - before
        return (steps(worker, given[3:5]), run_state(worker)), worker.state_dict(), sent

    def resumed(worker: Worker) -> Any:
        own = on_hosts(worker, tmp_path)
        assert worker.resume(tmp_path / "disk") == 3
        assert worker.resumed_from == next(own.iterdir())
        return (steps(worker, given[3:5]), run_state(worker)), worker.state_dict()

    found = on_workers(program(strategy), copied, optimizer=adamw)
    files = {path.name: path.stat().st_size for path in tmp_path.glob("host*/*/step-000003/*")}
    # Only what one host alone holds has been sent, once; what two hold both have written.
    assert sum(sent for *_, sent in found) == sum(
        size for name, size in files.items() if "-" not in name and name != MANIFEST
    )
    assert METADATA in files
    assert any("-" in name for name in files)

    shutil.rmtree(tmp_path / f"host{lost}")
    shutil.copytree(tmp_path, kept := tmp_path.with_name(f"{tmp_path.name}-kept"))
    again = on_workers(program(strategy), resumed, optimizer=adamw)
    assert_equal([own for own, _ in again], [own for own, *_ in found])

    shutil.rmtree(tmp_path)
    kept.rename(tmp_path)
    assert PLANS[SMALLER[strategy]] <= lost
    fewer = on_workers(program(SMALLER[strategy]), resumed, optimizer=adamw)
    torch.testing.assert_close(fewer[0][0][0], found[0][0][0], rtol=1e-5, atol=1e-5)
    assert_same(fewer[0][1], found[0][1], 1e-5)


def test_a_copy_is_private_follows_a_run_gives_way_to_a_newer_checkpoint_and_goes_at_the_end(tmp_path: Path) -> None:
    def run(worker: Worker) -> None:
        memory, given = on_hosts(worker, tmp_path), batches_of(small(), 4)
        with pytest.raises(LaunchError, match="of a run: save a checkpoint of it, or resume it, first"):
            worker.neighbour_copy()
        worker.save(tmp_path / "disk")
        worker.neighbour_copy()  # the checkpoint has it
        assert not list(memory.iterdir())
        for batch in given[:2]:
            steps(worker, [batch])
            worker.neighbour_copy()
        (copies,) = memory.iterdir()
        assert copies.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in copies.iterdir()] == ["step-000002"]
        worker.rank.transport.barrier()
        worker.resume(tmp_path / "disk" / "step-000000")  # by name
        assert not list(memory.iterdir())
        steps(worker, given[:1])
        worker.neighbour_copy()
        worker.save(tmp_path / "disk")
        worker.rank.transport.barrier()
        assert worker.resume(tmp_path / "disk") == 1
        assert worker.resumed_from == tmp_path / "disk"
        assert not list(memory.iterdir())
        steps(worker, given[:1])
        worker.neighbour_copy()
        assert list(memory.iterdir())
        worker.close()
        worker.rank.transport.barrier()
        assert not list(memory.iterdir())

    on_workers(small(), run)


def test_a_torn_copy_is_passed_over(tmp_path: Path) -> None:
    def copied(worker: Worker) -> None:
        on_hosts(worker, tmp_path)
        worker.save(tmp_path / "disk")
        steps(worker, batches_of(small(), 2))
        worker.neighbour_copy()

    def resumed(worker: Worker) -> int:
        on_hosts(worker, tmp_path)
        return worker.resume(tmp_path / "disk")

    on_workers(small(), copied)
    for path in tmp_path.glob("host*/*/step-000002/__1_0.distcp"):
        os.truncate(path, path.stat().st_size - 1)
    with pytest.warns(
        UserWarning, match=r"step-000002: missing or damaged: __1_0.distcp; step-000000 is taken instead"
    ):
        assert on_workers(small(), resumed) == [0, 0]


def test_without_room_for_a_copy_one_warning_is_given_and_the_copy_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []

    def room(*_: int) -> None:
        if full:
            raise OSError(28, "No space left on device")

    def run(worker: Worker) -> None:
        memory, given = on_hosts(worker, tmp_path), batches_of(small("layer_separation(n_c=1, n_f=1)"), 1)
        worker.save(tmp_path / "disk")
        for step in range(1, 5):
            steps(worker, given)
            worker.rank.transport.barrier()
            full[:] = [True] * (step in (2, 3))
            worker.rank.transport.barrier()
            worker.neighbour_copy()
            assert [path.name for path in memory.glob("*/*")] == [f"step-{step if step in (1, 4) else 1:06d}"]

    monkeypatch.setattr(os, "posix_fallocate", room)
    with pytest.warns(UserWarning, match=r"no room:[^$]*No space left[^$]*training goes on") as told:
        on_workers(small("layer_separation(n_c=1, n_f=1)"), run)
    assert len(told) == 1


def test_a_folder_that_others_may_use_is_not_used(tmp_path: Path) -> None:
    def run(worker: Worker) -> None:
        memory = on_hosts(worker, tmp_path)
        worker.save(tmp_path / "disk")
        (memory / f"splitc-{worker._checkpoints._run}").mkdir()
        (memory / f"splitc-{worker._checkpoints._run}").chmod(0o755)
        steps(worker, batches_of(small(), 1))
        worker.neighbour_copy()
        assert not list(memory.glob("*/*"))

    with pytest.warns(UserWarning, match="others have access to it; remove it"):
        on_workers(small(), run)


def test_a_copy_begins_often_enough_that_no_more_steps_are_lost() -> None:
    for cycle in (1, 2, 3, 8):
        for within in range(cycle, 50):
            every, beside = copies_every(within, cycle)
            assert every % cycle == 0
            # While a copy is made beside training the one before counts, until the next one begins.
            assert every * (2 if beside else 1) <= within
        with pytest.raises(
            LaunchError, match=f"--neighbour-copy {cycle - 1}: nothing can be copied within the {cycle}"
        ):
            copies_every(cycle - 1, cycle)
