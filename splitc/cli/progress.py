"""Show progress on stderr: at once on a terminal, elsewhere for steps that take more than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

PATIENCE = 2.0  # seconds before a step is shown where stderr is no terminal


class Step:
    """A step that may take long, as a context manager.  On a terminal its line is erased at the end."""

    def __init__(self, what: str, quiet: bool, stream: TextIO | None = None, patience: float = PATIENCE) -> None:
        self._what, self._quiet, self._patience = what, quiet, patience
        self._stream = stream if stream is not None else sys.stderr
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.seconds = 0.0

    def __enter__(self) -> Step:
        self._begin = self._shown = time.perf_counter()
        if not self._quiet:
            self._thread = threading.Thread(target=self._live if self._stream.isatty() else self._once, daemon=True)
            self._thread.start()
        return self

    def now(self, what: str) -> None:
        """Change what the step is doing; off a terminal, print it unless the last line is recent."""
        self._what = what
        if self._quiet or self._stream.isatty() or self._done.is_set():
            return
        if time.perf_counter() - self._shown >= self._patience:
            self._show()

    def doing(self, name: str) -> Callable[[str], None]:
        """Return a function that changes what the step is doing to `name`."""
        return lambda what: self.now(f"{what} {name}")

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        """Refresh the line with its seconds until the step ends."""
        shown = ""
        while True:
            seconds = int(time.perf_counter() - self._begin)
            text = f"{self._line()}{f' {seconds} s' if seconds >= 2 else ''}"
            self._write(f"\r{text}" + ("\x1b[K" if len(text) < len(shown) else ""))
            shown = text
            if self._done.wait(1.0):
                self._write("\r\x1b[K")
                return

    def _once(self) -> None:
        if not self._done.wait(self._patience) and self._shown == self._begin:
            self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        self._write(f"{self._line()}\n")

    def _line(self) -> str:
        return f"splitc: {self._what} ..."

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # stderr is closed
            self._done.set()
