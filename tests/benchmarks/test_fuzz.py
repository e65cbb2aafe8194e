"""Bad input of every kind works or is refused with one error; and what the judge of it must notice, it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fuzz import oracle
from benchmarks.fuzz.__main__ import fuzz
from benchmarks.fuzz.commands import Commands
from benchmarks.fuzz.models import require_only_texts
from benchmarks.fuzz.oracle import Judge
from splitc.errors import InternalError, LaunchError


@pytest.mark.slow
def test_three_hundred_inputs_are_taken_or_refused(tmp_path: Path) -> None:
    judge = fuzz(tmp_path, 300, only=["cluster", "plan", "diff", "options", "batch", "checkpoint", "environment"])
    assert not judge.found
    assert all(counts["refused"] for counts in judge.outcomes.values())


@pytest.mark.slow
def test_models_and_requests_are_taken_or_refused(tmp_path: Path) -> None:
    judge = fuzz(tmp_path, 1000, only=["model file", "compile", "names", "request", "API"])
    assert not judge.found


def wrong(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_the_judge_notices_what_no_input_may_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "SECONDS", 0.05)

    def spin() -> None:
        begun = time.process_time()
        while time.process_time() - begun < 5:
            pass

    folder = tmp_path / "folder"
    folder.mkdir()
    judge = Judge(folder)
    subjects: dict[str, Callable[[], object]] = {
        "of the folder": (tmp_path / "outside").touch,
        "os.system was called": lambda: os.system("true"),
        "hang": spin,
        "KeyError": wrong(KeyError("x")),
        "InternalError": wrong(InternalError("a bug")),
        "few words": wrong(LaunchError("no")),
        "insides": wrong(LaunchError("an odd value: <class 'int'> was given")),
    }
    for text, subject in subjects.items():
        judge.found.clear()
        judge("kind", "input", subject)
        assert any(text in found for found in judge.found), text
    judge.found.clear()
    judge("kind", "input", (folder / "inside").touch)
    judge("kind", "input", wrong(LaunchError("what is wrong, where, and what to do")))
    assert not judge.found
    assert judge.outcomes["kind"] == {"works": 1, "refused": 1, "wrong": 7}


def test_a_text_that_became_a_call_is_noticed() -> None:
    require_only_texts('''"""__import__('os').system('x')"""''')
    with pytest.raises(AssertionError, match="a text became a call"):
        require_only_texts('''""""""\n__import__("os").system("x")''')


def test_a_process_that_writes_outside_of_its_folder_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    commands = Commands(folder, Judge(folder))
    commands.watch()
    code, text = commands.run(folder, ["-c", "open('inside', 'w'); open('../outside', 'w'); 1 / 0"])
    assert code == 1 and "ZeroDivisionError" in text
    (line,) = (folder / "log").read_text().splitlines()
    assert line == f"open outside of the folder: {tmp_path / 'outside'}"
