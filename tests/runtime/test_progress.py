"""What long work shows: a line that renews itself on a terminal, and no control character elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.launch import shown
from splitc.runtime.launch.shown import Shown
from splitc.runtime.progress import Line


class Steps:
    epoch = "  epoch 2 of 3"

    def __len__(self) -> int:
        return 300


def run(steps: int, log_every: int | None = None, rank: int = 0) -> None:
    worker: Any = SimpleNamespace(rank=SimpleNamespace(index=rank), batch_offsets=(0, 16, 32))
    show, batches = Shown(worker, Steps(), SimpleNamespace(log_every=log_every)), range(1, steps + 1)  # type: ignore[arg-type]
    for step in batches:
        show(step, 1 / step)
    show.say("evaluation 1.0")


def test_on_a_terminal_the_line_renews_itself_fits_and_leaves_the_cursor_at_its_beginning() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        line = Line(terminal)
        line.show("one")
        line.show("too soon")
        line._shown -= 1.0
        line.show("two " * 100)
        line.keep("it stays")
        line.keep("", end="")
    seen = ""
    with os.fdopen(ours, "rb", buffering=0) as read, suppress(OSError):  # EIO: all is read, and no terminal is left
        while part := read.read(4096):
            seen += part.decode()
    first, second, rest = seen.split("\r", 2)
    assert first == "\x1b[Kone"
    assert second.startswith("\x1b[Ktwo two") and len(second) == len("\x1b[K") + 79
    assert rest == "\x1b[Kit stays\r\n\x1b[K"


def test_elsewhere_steps_are_lines_all_of_the_first_and_then_few(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "_PATIENCE", 1e9)
    run(300)
    out = capsys.readouterr().out
    assert [int(step) for step in re.findall(r"^step (\d+)  loss ", out, re.M)] == [*range(1, 101), 300]
    assert "\r" not in out and "\x1b" not in out
    pattern = r"step 2  loss 0\.500000  \d+\.\d{3} s  \d+ samples/s  epoch 2 of 3  \d+ s left"
    assert re.fullmatch(pattern, out.splitlines()[1])
    run(300, log_every=150)
    assert re.findall(r"^\w+ \S+", capsys.readouterr().out, re.M) == ["step 150", "step 300", "evaluation 1.0"]
    run(2, rank=1)
    assert capsys.readouterr().out == ""


def test_a_closed_stream_ends_progress_and_not_the_work() -> None:
    stream = io.StringIO()
    line = Line(stream, patience=0.0)
    stream.close()
    line.show("nobody")
    line.keep("reads this")
