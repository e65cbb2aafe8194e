"""Whether a run is started again, of what is noted of its starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitc.runtime.checkpoints.folders import find_disks
from splitc.runtime.launch.history import History
from tests.support.ranks import on_ranks


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "launch.py").write_text("train()")
    monkeypatch.setattr("sys.argv", ["launch.py", "--steps", "9"])
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return tmp_path / "build"


def start(build: Path, rank: int = 0, monkeypatch: pytest.MonkeyPatch | None = None) -> History:
    if monkeypatch is not None:
        monkeypatch.setenv("RANK", str(rank))
    return History(build.parent / "run", build / "launch.py")


def fails(build: Path, step: int, why: str = "ValueError: no") -> str | None:
    """A start that fails in a step; returns why there is no other one."""
    history = start(build)
    assert history.begin() is None
    history.at(step)
    return history.failed(why, final=False)


def test_three_failures_at_a_step_are_the_end_and_failures_at_others_are_not(build: Path) -> None:
    assert [fails(build, step) for step in (7, 5, 7, 8, 5)] == [None] * 5
    stop = fails(build, 7, "ValueError: the last")
    assert stop is not None
    path = build.parent / "run" / "failures.jsonl"
    assert stop.splitlines() == [
        "step 7 failed 3 times, at last by: rank ?: ValueError: the last",
        f"  {path} has all; it is tried again with another build, with other options, or when you delete that file",
    ]
    assert [start(build).begin(), start(build).begin()] == [stop, stop]  # whoever starts it
    assert [json.loads(line).get("step") for line in path.read_text().splitlines() if "failed" in line][:6] == [
        7, 5, 7, 8, 5, 7,
    ]  # fmt: skip


@pytest.mark.parametrize("mended", ["build", "option", "file"])
def test_what_mends_a_run_lets_it_start_again(mended: str, build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fails(build, 3) for _ in range(3)][:2] == [None, None]
    assert start(build).begin() is not None
    if mended == "build":
        (build / "launch.py").write_text("train_otherwise()")
    elif mended == "option":
        monkeypatch.setattr("sys.argv", ["launch.py", "--steps", "9", "--seed", "1"])
    else:
        (build.parent / "run" / "failures.jsonl").unlink()
    assert [fails(build, 3) for _ in range(2)] == [None, None]
    assert fails(build, 3) is not None


def test_resuming_mends_nothing(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        fails(build, 3)
    monkeypatch.setattr("sys.argv", ["launch.py", "--steps", "9", "--resume"])
    assert start(build).begin() is not None


def test_a_start_that_was_killed_counts_at_the_step_it_was_in(build: Path) -> None:
    for _ in range(3):
        killed = start(build)
        assert killed.begin() is None
        killed.at(6)
    stop = start(build).begin()
    assert stop is not None
    assert stop.startswith("step 6 failed 3 times, at last by: a rank was killed, by the kernel where memory runs out")


def test_starts_that_were_killed_before_a_step_count_for_nothing(build: Path) -> None:
    """So end the ranks that wait for a host that was lost."""
    for _ in range(5):
        assert start(build).begin() is None


def test_a_run_that_ended_is_no_failure(build: Path) -> None:
    for _ in range(4):
        history = start(build)
        assert history.begin() is None
        history.at(9)
        history.ended()


def test_wrong_input_stops_the_starts_of_one_torchrun_alone(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = start(build)
    assert history.begin() is None
    assert history.failed("error: no such data", final=True) == "error: no such data"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for rank in (0, 1):
        assert start(build, rank, monkeypatch).begin() == "error: no such data"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # a person has started it, who may have mended what is wrong
    assert start(build, 0, monkeypatch).begin() is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(build, 0, monkeypatch).begin() is None


def test_failures_of_several_ranks_in_a_start_are_one(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        ranks = [start(build, rank, monkeypatch) for rank in range(3)]
        for rank, history in enumerate(ranks):
            monkeypatch.setenv("RANK", str(rank))
            assert history.begin() is None
            history.at(4)
        assert [history.failed("no", final=False) for history in ranks] == [None] * 3


def test_checkpoints_lie_beside_it(build: Path) -> None:
    fails(build, 3)
    on_ranks(2, lambda transport: find_disks(transport, build.parent / "run"))
