"""Real launches under torchrun: they train as one process does, and end quickly and clearly when something is wrong.

Every launch imports torch in each process, which takes seconds; so there are few, and each checks many things.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from splitc.errors import LaunchError
from splitc.runtime.launch.feed import found, synthetic, taken
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.launch.trial import torchrun_trial
from splitc.runtime.spec import Input
from splitc.runtime.worker import Worker
from tests import ROOT
from tests.support.launched import BATCH, PIDS, WORLD, Examples, Perceptron, batches, program
from tests.support.ranks import assert_same, on_workers, one_process, plan_of, rank_spec


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return program().save(tmp_path / "build")


def launch(*arguments: Any, world: int = WORLD, environment: Mapping[str, str] | None = None) -> tuple[int, str, float]:
    """torchrun's exit status, all output in its order, and the seconds it took; fails when it does not end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,  # one takes about 5 on a quiet machine; a rank that waits for a lost peer takes 120
        check=False,
    )
    return done.returncode, done.stdout, time.monotonic() - begin


def expected(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process on the same batches, with the optimizer of launch.py."""
    data, model = Examples(), Perceptron()
    batches = [data[k * BATCH % 16 : k * BATCH % 16 + BATCH] for k in range(steps)]
    return one_process(model, batches, lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9))


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.processes
def test_a_build_trains_on_the_users_data_as_one_process_and_its_saved_state_loads_into_the_model(
    build: Path, tmp_path: Path
) -> None:
    arguments = ["--steps", 6, "--data", "tests.support.launched:batches", "--save", tmp_path / "state.pt"]
    code, output, _ = launch(build / "launch.py", *arguments)
    assert code == 0, output
    losses, state = expected(6)
    printed = re.findall(r"^step (\d+)  loss (\S+)  \S+ s\b", output, re.MULTILINE)
    assert [int(step) for step, _ in printed] == [1, 2, 3, 4, 5, 6]  # once, by rank 0
    assert [float(loss) for _, loss in printed] == pytest.approx(losses, abs=2e-6)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(saved, state)
    Perceptron().load_state_dict(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["build", "state.pt"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_build_that_ends_within_a_round_saves_the_average_of_its_units(tmp_path: Path) -> None:
    strategy = "local_sgd(period=4, fragments=2, delay=2, through=server, outer_lr=0.7, outer_momentum=0.9)"
    folder = program(strategy).save(tmp_path / "build")
    arguments = ["--steps", 6, "--data", "tests.support.launched:batches", "--save", tmp_path / "state.pt"]
    code, output, _ = launch(folder / "launch.py", *arguments)
    assert code == 0, output

    def train(worker: Worker) -> dict[str, torch.Tensor] | None:
        for batch in islice(batches(worker), 6):
            worker.step(*batch)
        return worker.state_dict()

    state = on_workers(
        program(strategy), train, optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)
    )[0]
    assert state is not None
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), state)


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_goes_on_from_its_last_checkpoint_and_evaluates(build: Path, tmp_path: Path) -> None:
    dataset, folder = "tests.runtime.launch.test_feed:dataset", tmp_path / "run"
    common: list[Any] = ["--data", dataset, "--eval-data", dataset]
    pattern = re.compile(r"^step (\d+)  (loss|evaluation) (\S+)", re.MULTILINE)
    code, whole, _ = launch(build / "launch.py", *common, "--epochs", 2, "--eval-every", 3)
    assert code == 0, whole
    common += ["--checkpoints", folder]
    code, begun, _ = launch(build / "launch.py", *common, "--steps", 5, "--eval-every", 3, "--save-every", 2)
    assert code == 0, begun
    code, ended, _ = launch(build / "launch.py", *common, "--epochs", 2, "--eval-every", 3, "--resume")
    assert code == 0 and f"goes on after step 5, from {folder}" in ended, ended
    every = [found for found in pattern.findall(begun) if found[:2] != ("5", "evaluation")] + pattern.findall(ended)
    assert every == pattern.findall(whole)
    assert [int(step) for step, kind, _ in every if kind == "loss"] == [*range(1, 9)]
    assert [int(step) for step, kind, _ in every if kind == "evaluation"] == [3, 6, 8]


@pytest.mark.slow
@pytest.mark.processes
def test_a_standalone_build_runs_without_splitc_on_synthetic_batches(tmp_path: Path) -> None:
    folder = program().save(tmp_path / "alone", standalone=True)
    code, output, _ = launch(folder / "launch.py", "--steps", 2, environment={"PYTHONPATH": ""})
    assert code == 0, output
    assert re.findall(r"^step (\d+)  loss [\d.]+ ", output, re.MULTILINE) == ["1", "2"]


@pytest.mark.slow
@pytest.mark.processes
def test_workers_of_compiled_and_of_deferred_programs_train_as_one_process(tmp_path: Path) -> None:
    code, output, _ = launch("-m", "tests.support.launched", tmp_path)
    assert code == 0, output
    data = Examples()
    losses, state = one_process(Perceptron(), [data[k : k + BATCH] for k in range(0, 16, BATCH)])
    for name in ("compiled", "deferred"):
        saved = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert saved.pop("losses").tolist() == pytest.approx(losses, rel=1e-5)
        assert_same(saved, state)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("data", "first_error"), [("failing", "ValueError: rank 1 has had enough"), ("killed", "exitcode: -9")]
)
def test_when_a_rank_is_lost_its_error_comes_first_and_no_process_is_left(
    data: str, first_error: str, build: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    code, output, seconds = launch(
        build / "launch.py", "--steps", 4, "--data", f"tests.support.launched:{data}", environment={PIDS: str(pids)}
    )
    assert code != 0
    assert seconds < 90
    assert "step 2  loss" in output
    assert "step 3  loss" not in output
    errors = [line for line in output.splitlines() if re.search(r"Error: |PeerLost|stopped: |exitcode: ", line)]
    assert first_error in errors[0]
    assert re.search(r"Root Cause \(first observed failure\):\n\[0\]:\n.*\n.*\n  rank      : 1 ", output)
    noted = [int(path.name) for path in pids.iterdir()]
    assert len(noted) == 3  # two ranks, and the reader's loader
    deadline = time.monotonic() + 60  # a loader looks for its parent every 5 s
    while any(map(alive, noted)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in noted if alive(pid)] == []


@pytest.mark.slow
@pytest.mark.processes
def test_a_wait_that_takes_too_long_names_the_rank_that_is_late_and_the_line_of_the_one_that_waits(
    build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITC_TIMEOUT", "5")  # in which ranks also have to find each other
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ["--steps", "4", "--data", "tests.support.launched:late"]
    done = torchrun([str(build / "launch.py"), *options], WORLD, quiet=True)
    first, *lines = done.stderr.splitlines()
    assert re.match(
        r"training hangs: rank 0 has been in your code, after step 3, .*\(launched.py, line \d+, in late\)", first
    )
    assert any(re.match(r"  rank 1, in step 4: waits in irecv .* from rank 0, ", line) for line in lines)
    assert any(re.match(r"    head\.py, line \d+: \w+ = comm\.recv\(\"trunk\"", line) for line in lines)
    assert done.returncode == 1 and done.stderr.count("training hangs") == 1


@pytest.mark.slow
@pytest.mark.processes
def test_a_trial_in_processes_raises_the_first_ranks_own_error(tmp_path: Path) -> None:
    files = dict(program().files)
    files["head.py"] = files["head.py"].replace("loss.backward()", "raise KeyError('broken on purpose')")
    feeds = [[Examples()[:BATCH]]]
    with pytest.raises(LaunchError) as caught:
        torchrun_trial(tmp_path, files, program().weights(), WORLD, feeds, [BATCH], 0.1, 0.9)
    lines = str(caught.value).strip().splitlines()
    assert lines[0] == "the ranks failed:"
    assert lines[-2] == "KeyError: 'broken on purpose'"
    assert re.fullmatch(r"in step 1, head\.py, line \d+: raise KeyError\('broken on purpose'\)", lines[-1])
    assert any(re.search(r"head\.py\", line \d+, in step", line) for line in lines)


# -- without launching -------------------------------------------------------------------------------------------------


def test_synthetic_batches_are_the_ranks_own_and_repeat_with_their_seed() -> None:
    inputs = {
        "x": Input((-1, 3), "float64"),
        "labels": Input((-1,), "int64", 7),
        "mask": Input((2, -1), "bool"),
        "ids": Input((-1, 4), "int32", 3),
    }

    def draw(index: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
        batches = synthetic(rank_spec(plan_of(all=(0, 10, 20)), index, inputs=inputs), seed)
        return [next(batches), next(batches)]

    first, second = draw(0, 0)
    assert [(tuple(t.shape), t.dtype) for t in first] == [
        ((10, 3), torch.float64),
        ((10,), torch.int64),
        ((2, 10), torch.bool),
        ((10, 4), torch.int32),
    ]
    assert int(first[1].max()) < 7
    assert int(first[3].max()) < 3
    seen = [batch[0] for index in (0, 1) for seed in (0, 1) for batch in draw(index, seed)]
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 8
    assert torch.equal(draw(1, 1)[1][0], draw(1, 1)[1][0])
    assert not torch.equal(first[0], second[0])


def naive(worker: Worker) -> Iterator[Any]:
    """Data as a user writes it who knows of no ranks: a list a batch, on every rank."""
    for _ in range(2):
        yield [torch.zeros(BATCH, 6), torch.zeros(BATCH, dtype=torch.int64)]


def test_what_a_data_function_gives_is_dropped_on_ranks_that_read_no_data() -> None:
    def run(worker: Worker) -> list[int]:
        return [
            len(batch)
            for batch in taken(found("tests.runtime.launch.test_main:naive", worker), worker)
            if worker.step(*batch).dim() == 0
        ]

    assert on_workers(program(), run) == [[2, 2], [0, 0]]
