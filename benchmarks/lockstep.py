"""Processes that stop at marks, so that their parent can read counters while all of them stand still.

A rank calls `Marks.reach("warm", ...)`: it writes one line and waits for one.  The parent hears all ranks, reads what
it wants, and lets them go on.  Or the line that a rank waits for is a command: `Lockstep.order` and `Marks.ask`.  This
needs no message between the ranks, so it adds nothing to what is counted.

Lines are JSON.  One at the mark `progress` may come at any time and answers nothing.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

TIMEOUT = 300.0  # seconds to the next mark
_PROGRESS = "progress"
_TAIL = 15  # lines of a failed rank's errors that are shown


class Marks:
    """A rank's side.  Its standard output is for marks alone: what it prints otherwise goes to its errors."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._text = b""

    def reach(self, mark: str, **figures: Any) -> None:
        """Tell the parent, and wait until it lets this rank go on.  Raises BenchmarkError when the parent is gone."""
        self.tell(mark, **figures)
        self._line()

    def tell(self, mark: str, **figures: Any) -> None:
        """Tell the parent, and go on."""
        text = (json.dumps({"mark": mark, **figures}) + "\n").encode()
        while text:
            text = text[os.write(self._out, text) :]

    def progress(self, text: str) -> None:
        """Tell the parent what this rank is at."""
        self.tell(_PROGRESS, text=text)

    def ask(self) -> dict[str, Any]:
        """Wait for the parent's next command.  Raises BenchmarkError when the parent is gone."""
        command: dict[str, Any] = json.loads(self._line())
        return command

    def _line(self) -> bytes:
        while b"\n" not in self._text:
            more = os.read(0, 65536)
            if not more:
                raise BenchmarkError("the process that started this rank is gone")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return line


class Lockstep:
    """The parent's side.  processes: with pipes without buffers as input and output.  logs: where their errors go."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
        self._processes, self._logs = processes, logs
        self._texts = [b""] * len(processes)

    def hear(
        self, mark: str, timeout: float = TIMEOUT, progress: Callable[[int, str], None] | None = None
    ) -> list[dict[str, Any]]:
        """What every rank says at `mark`, in the order of the ranks.

        progress: called with a rank and what it is at.
        Raises BenchmarkError, with the last lines of its errors, when a rank ends or says something else before.
        """
        deadline = time.monotonic() + timeout
        said: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None, "a rank in lockstep talks through pipes"
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(str(key.data) for key in selector.get_map().values())
                    raise BenchmarkError(f"rank {late} did not come to {mark!r} within {timeout:g} s")
                for key, _ in ready:
                    rank, text = key.data, os.read(key.fd, 65536)
                    if not text:
                        raise BenchmarkError(self._failure(rank, f"before {mark!r}"))
                    *lines, self._texts[rank] = (self._texts[rank] + text).split(b"\n")
                    for figures in map(json.loads, lines):
                        if figures["mark"] != _PROGRESS:
                            said[rank] = figures
                            selector.unregister(key.fileobj)
                        elif progress is not None:
                            progress(rank, figures["text"])
        for rank, figures in said.items():
            if figures["mark"] != mark:
                raise BenchmarkError(f"rank {rank} came to {figures['mark']!r}, not to {mark!r}")
        return [said[rank] for rank in range(len(self._processes))]

    def go_on(self) -> None:
        """Let all ranks go on."""
        self._write(b"\n")

    def order(self, **command: Any) -> None:
        """Give all ranks the same command.  Raises BenchmarkError, with its last lines, when a rank has ended."""
        self._write((json.dumps(command) + "\n").encode())

    def _write(self, text: bytes) -> None:
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None, "a rank in lockstep talks through pipes"
            try:
                process.stdin.write(text)
            except BrokenPipeError as error:
                raise BenchmarkError(self._failure(rank, "while it was waited for")) from error

    def _failure(self, rank: int, when: str) -> str:
        status = self._processes[rank].wait()
        lines = self._logs[rank].read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"rank {rank} ended with status {status} {when}:", *(f"  {line}" for line in lines)])
