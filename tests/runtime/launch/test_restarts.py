"""Runs that are started again after failures, or stop for a signal, end as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import ROOT
from tests.support.restarted import STEPS, program

pytestmark = [pytest.mark.slow, pytest.mark.processes]


class Found(NamedTuple):
    folder: Path
    starts: dict[str, list[tuple[list[int], float]]]

    def codes(self, name: str) -> list[list[int]]:
        return [codes for codes, _ in self.starts[name]]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def state(self, name: str) -> dict[str, torch.Tensor]:
        saved: dict[str, torch.Tensor] = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return saved


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("built") / "build")


@pytest.fixture(scope="module")
def found(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.restarted", str(build), str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return Found(folder, json.loads((folder / "found.json").read_text()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_killed_in_forward_in_an_exchange_and_in_a_checkpoint_ends_bit_for_bit_as_if_it_was_not(
    found: Found,
) -> None:
    assert found.codes("undisturbed") == [[0, 0]]
    codes = found.codes("killed")
    assert [-signal.SIGKILL in each for each in codes] == [True, True, True, False], found.log("killed")
    assert codes[3] == [0, 0]
    resumed = [int(step) for step in re.findall(r"goes on after step (\d+)", found.log("killed"))]
    assert resumed == sorted(resumed)  # a checkpoint that was being written is not there
    assert set(resumed) <= {3, 6}
    assert resumed[-1] == 6
    assert same(found.state("killed"), found.state("undisturbed"))
    assert max(seconds for _, seconds in found.starts["killed"]) < 15  # far below the wait for a peer


def test_a_run_whose_rank_is_killed_goes_on_from_a_copy_in_memory_of_at_most_so_many_steps_before(found: Found) -> None:
    codes = found.codes("copied")
    assert -signal.SIGKILL in codes[0], found.log("copied")
    assert codes[1] == [0, 0], found.log("copied")
    ((step, folder),) = re.findall(r"goes on after step (\d+), from (\S+)", found.log("copied"))
    assert int(step) in (4, 6, 8)
    assert int(step) >= 8 - 5
    assert Path(folder).parent == found.folder / "memory"
    assert not list((found.folder / "memory").iterdir())
    assert same(found.state("copied"), found.state("undisturbed"))


def test_three_failures_at_a_step_stop_a_run_and_every_further_start_of_it(found: Found) -> None:
    own = [codes[1] for codes, _ in found.starts["fails"]]
    assert own[:3] == [1, 1, 3], found.log("fails")
    *others, last = sorted(found.codes("fails")[3])
    assert last == 3 and others[0] in (0, -signal.SIGTERM)  # as soon as torchrun sees it
    log = found.log("fails")
    assert len(re.findall("^ValueError: rank 1 has had enough$", log, re.M)) == 3  # the traceback of each start, once
    assert log.count("step 5 failed 3 times, at last by: rank 1: ValueError: rank 1 has had enough") == 2
    assert f"{found.folder}/fails/failures.jsonl has all" in log


def test_wrong_input_is_told_at_each_further_start_before_anything_is_loaded(found: Found) -> None:
    assert [sorted(codes)[-1] for codes in found.codes("wrong")] == [3, 3]
    line = "error: --eval-data tests.support.restarted:data_of_nobody: tests.support.restarted has no data_of_nobody"
    assert found.log("wrong").count(line) == 2


def test_a_signal_to_one_rank_stops_all_after_a_step_and_the_run_goes_on_bit_for_bit(found: Found) -> None:
    assert found.codes("stopped") == [[0, 0], [0, 0]], found.log("stopped")
    (step,) = re.findall(
        r"^stopped by SIGTERM after step (\d+); goes on: the same command with --resume$", found.log("stopped"), re.M
    )
    assert re.findall(r"goes on after step (\d+)", found.log("stopped")) == [step]
    assert re.findall(r"^step (\d+)  loss", found.log("stopped"), re.M) == [str(k + 1) for k in range(STEPS)]
    assert same(found.state("stopped"), found.state("undisturbed"))


# -- with torchrun -----------------------------------------------------------------------------------------------------


def started(build: Path, folder: Path, *options: Any, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "splitc.cli", "run", build, "--checkpoints", folder, *options]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it else
    )


def test_splitc_run_starts_a_run_again_whose_rank_was_killed(build: Path, tmp_path: Path) -> None:
    data = "tests.support.launched:killed_once"
    options = ["--restarts", 2, "--save-every", 1, "--steps", 4, "--data", data]
    process = started(build, tmp_path / "run", *options, KILLED_ONCE=str(tmp_path / "killed"))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "local rank 1 was ended by SIGKILL" in errors
    assert errors.count("restart 1 of 2\n") == 1
    assert re.findall(r"^(\D+\d+)(?:  loss|, from)", output, re.M)[-2:] == ["step 3", "step 4"]
    assert "goes on after step " in output


def test_splitc_run_stops_after_a_step_at_ctrl_c_and_says_how_it_goes_on(build: Path, tmp_path: Path) -> None:
    process = started(build, tmp_path / "run", "--steps", 10**6)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 1 ")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    line = (
        r"stopped by SIGINT after step (\d+); goes on: splitc run (\S+) --checkpoints (\S+) --steps 1000000 --resume\n"
    )
    stopped = re.search(line, errors)
    assert stopped is not None, errors
    assert [path.name for path in (tmp_path / "run").glob("step-*")][-1:] == [f"step-{int(stopped[1]):06d}"]
