"""How a rank that fails ends, and what it prints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from splitc.errors import LaunchError
from splitc.runtime.errors import STOP
from splitc.runtime.launch.failures import guarded
from splitc.runtime.transport.base import PeerLost


class Ended(BaseException):
    pass


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, BaseException], object]:
    """End a rank of a host by an error; returns its exit status."""

    def leave(status: int) -> None:
        raise Ended(status)

    def end(rank: int, error: BaseException) -> object:
        def run() -> None:
            raise error

        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        with pytest.raises(Ended) as caught:
            guarded(run)
        return caught.value.args[0]

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return end


def test_an_error_that_all_ranks_of_a_host_have_is_printed_by_the_first(
    fail: Callable[..., object], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert [fail(rank, LaunchError("a wrong build")) for rank in range(3)] == [STOP, 0, 0]
    assert capfd.readouterr().err == "error: a wrong build\n"
    assert json.loads((tmp_path / "0" / "error.json").read_text())["message"]["message"] == "its error is printed above"
    assert not (tmp_path / "1" / "error.json").exists()


def test_different_errors_are_all_printed(fail: Callable[..., object], capfd: pytest.CaptureFixture[str]) -> None:
    assert [fail(rank, LaunchError(f"rank {rank} is wrong")) for rank in range(2)] == [STOP, STOP]
    assert capfd.readouterr().err == "error: rank 0 is wrong\nerror: rank 1 is wrong\n"


def test_an_exception_of_the_user_keeps_its_traceback_once(
    fail: Callable[..., object], capfd: pytest.CaptureFixture[str]
) -> None:
    assert [fail(rank, ValueError("enough")) for rank in (1, 0)] == [1, 0]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "rank 1 failed:"
    assert lines[1].startswith("Traceback")
    assert lines[-2:] == ["ValueError: enough", ""]


def test_ranks_that_lost_a_peer_say_where_once_and_torchrun_does_not_take_them_for_the_cause(
    fail: Callable[..., object], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lost = PeerLost("rank 0 of 4: irecv (2, 3) float32 from rank 2")
    lost.add_note("in step 7, conv.py, line 31: cut0 = received.wait()")
    assert [fail(0, lost), fail(1, PeerLost("rank 1 of 4: barrier"))] == [1, 0]
    assert capfd.readouterr().err.splitlines() == [
        "stopped: rank 0 of 4: irecv (2, 3) float32 from rank 2",
        "  in step 7, conv.py, line 31: cut0 = received.wait()",
        "  (if a rank failed by itself, its error stands above, or on its host; --resume goes on from a checkpoint)",
    ]
    assert not (tmp_path / "0" / "error.json").exists()
