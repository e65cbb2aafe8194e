"""Show progress: one line that renews itself on a terminal; elsewhere lines, of what takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE = 2.0  # seconds before a step is shown where stderr is no terminal
_OFTEN = 0.1  # seconds between two texts on a terminal


class Line:
    """The last line of a stream.  patience: seconds between two lines that are no terminal's.

    The cursor is left at its beginning, so that whatever else is printed takes its place.
    """

    def __init__(self, stream: TextIO, patience: float = PATIENCE) -> None:
        self.renews = stream.isatty()
        self._stream, self._patience = stream, _OFTEN if self.renews else patience
        self._shown = time.perf_counter() - _OFTEN * self.renews

    def show(self, text: str) -> None:
        """Renew the line, or write one, unless the last text is recent."""
        if time.perf_counter() - self._shown >= self._patience:
            self.keep(text, "\r" if self.renews else "\n")

    def keep(self, text: str, end: str = "\n") -> None:
        """Write a line that stays, in place of what is shown."""
        self._shown = time.perf_counter()
        if self.renews:
            text = "\x1b[K" + text[: _columns(self._stream) - 1 if end == "\r" else None]
        self._write(text + end)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the stream is closed
            self._patience = float("inf")


class Step:
    """A step that may take long, as a context manager.  On a terminal its line is erased at the end."""

    def __init__(self, what: str, quiet: bool, stream: TextIO | None = None, patience: float = PATIENCE) -> None:
        self._what, self._quiet, self._patience = what, quiet, patience
        self._line = Line(stream if stream is not None else sys.stderr, patience)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.seconds = 0.0

    def __enter__(self) -> Step:
        self._begin = time.perf_counter()
        if not self._quiet:
            self._thread = threading.Thread(target=self._live, daemon=True)
            self._thread.start()
        return self

    def now(self, what: str) -> None:
        """Change what the step is doing; off a terminal, print it unless the last line is recent."""
        self._what = what
        if not (self._quiet or self._line.renews or self._done.is_set()):
            self._line.show(self._text())

    def doing(self, name: str) -> Callable[[str], None]:
        """Return a function that changes what the step is doing to `name`."""
        return lambda what: self.now(f"{what} {name}")

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        """Refresh the line with its seconds until the step ends; off a terminal, write it once."""
        if not self._line.renews:
            if not self._done.wait(self._patience):
                self._line.show(self._text())
            return
        while True:
            seconds = int(time.perf_counter() - self._begin)
            self._line.show(f"{self._text()}{f' {seconds} s' if seconds >= 2 else ''}")
            if self._done.wait(1.0):
                self._line.keep("", end="")
                return

    def _text(self) -> str:
        return f"splitc: {self._what} ..."


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
