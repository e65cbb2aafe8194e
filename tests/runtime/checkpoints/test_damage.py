"""A damaged checkpoint is never taken over: the one before is, which is said, or the damage is named."""

from __future__ import annotations

import random
import re
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.checkpoints.manifest import MANIFEST, Manifest
from splitc.runtime.worker import Worker
from tests.runtime.checkpoints.test_resume import assert_equal, batches_of, steps
from tests.support.every_strategy import planned
from tests.support.ranks import adam, on_workers
from tests.support.run_state import run_state
from tests.support.sampling import along


def flip(path: Path, at: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[at.randrange(len(data))] ^= 1 << at.randrange(8)
    path.write_bytes(data)


def cut(path: Path, at: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: at.randrange(len(data))])


def zero(path: Path, at: random.Random) -> None:
    data, begin = bytearray(path.read_bytes()), 0
    begin = at.randrange(len(data))
    data[begin : begin + 64] = bytes(len(data[begin : begin + 64]))
    path.write_bytes(data)


def remove(path: Path, at: random.Random) -> None:
    path.unlink()


DAMAGES: list[Callable[[Path, random.Random], None]] = [flip, cut, zero, remove]


@cache
def program(strategy: str) -> CompiledProgram:
    return planned(3, strategy)


def written(strategy: str, folder: Callable[[int], Path]) -> list[list[Any]]:
    """Two checkpoints; for each rank its state at both."""

    def run(worker: Worker) -> list[Any]:
        found = []
        for batch in batches_of(program(strategy), 2):
            steps(worker, [batch])
            worker.save(folder(worker.rank.index))
            found.append(run_state(worker))
        return found

    return on_workers(program(strategy), run, optimizer=adam)


@pytest.mark.slow
@along(strategy=["late_multiply", "layer_separation(n_c=2, n_f=1)"], disks=[1, 3])
def test_whatever_is_damaged_resuming_is_right_or_goes_back_aloud(strategy: str, disks: int, tmp_path: Path) -> None:
    def folder(rank: int) -> Path:
        return run / f"disk{rank % disks}"

    run, whole = tmp_path / "run", tmp_path / "whole"
    states, fallbacks = written(strategy, folder), 0
    shutil.copytree(run, whole)
    newest = sorted(path.relative_to(run) for path in run.glob("*/step-000002/*"))
    for seed, path in enumerate(newest):
        damage = DAMAGES[(seed + seed // 4) % 4]
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        damage(run / path, random.Random(seed))
        if (run / path).exists() and (run / path).read_bytes() == (whole / path).read_bytes():
            continue

        def resumed(worker: Worker) -> tuple[int, Any]:
            return worker.resume(folder(worker.rank.index)), run_state(worker)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = on_workers(program(strategy), resumed, optimizer=adam)
        assert len({at for at, _ in got}) == 1
        for (at, state), expected in zip(got, states, strict=True):
            assert_equal(state, expected[at - 1])
        if got[0][0] == 1:
            fallbacks += 1
            text = f"step-000002: missing or damaged: {re.escape(path.name)}.*; step-000001 is taken instead"
            assert any(re.search(text, str(each.message)) for each in said)
    assert fallbacks > 0 if disks == 1 else fallbacks == 0  # every file is on two of several disks


def test_where_no_checkpoint_is_whole_all_are_named_and_nothing_changes(tmp_path: Path) -> None:
    written("data_parallel", lambda rank: tmp_path)
    (tmp_path / "step-000001" / MANIFEST).unlink()  # as of an earlier version
    flip(tmp_path / "step-000002" / ".metadata", random.Random(1))

    def refused(worker: Worker) -> str:
        before = run_state(worker)
        with pytest.raises(LaunchError) as caught:
            worker.resume(tmp_path)
        assert_equal(run_state(worker), before)
        return str(caught.value)

    (text,) = set(on_workers(program("data_parallel"), refused, optimizer=adam))
    assert text.splitlines()[1:] == [
        "  - step-000002: missing or damaged: .metadata",
        "  - step-000001: missing or damaged: .manifest (new in this version)",
    ]


@pytest.mark.slow
def test_a_run_goes_on_beside_a_damaged_checkpoint_and_replaces_it(tmp_path: Path) -> None:
    written("data_parallel", lambda rank: tmp_path)
    flip(tmp_path / "step-000002" / MANIFEST, random.Random(2))

    def run(worker: Worker) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert worker.resume(tmp_path) == 1
        steps(worker, batches_of(program("data_parallel"), 1))
        worker.save(tmp_path)
        return worker.resume(tmp_path)

    assert on_workers(program("data_parallel"), run, optimizer=adam) == [2, 2, 2]


def test_a_manifest_that_says_another_thing_than_it_was_written_with_is_damaged(tmp_path: Path) -> None:
    Manifest("run", "start", {"file": 1}).write(tmp_path)
    assert Manifest.of(tmp_path) == Manifest("run", "start", {"file": 1})
    text = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(text.replace('"run"}', '"ran"}').replace('"file": 1', '"file": 2'))
    assert Manifest.of(tmp_path) is None


@pytest.mark.parametrize("run", ["", "..", "x/../../home", 3, None])
def test_a_run_whose_name_leads_to_another_folder_is_none(tmp_path: Path, run: Any) -> None:
    Manifest(run, "0a1b2c3d", {}).write(tmp_path)
    assert Manifest.of(tmp_path) is None
    Manifest("0a1b2c3d", "0a1b2c3d", {}).write(tmp_path)
    assert Manifest.of(tmp_path) is not None
