"""Judge what an input did: it works, or one clear error; nothing hangs, runs, or is written outside of the folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.junk import MARK
from splitc.errors import InternalError, SplitcError

SECONDS = 20  # of processor time for an input
_LONGEST = 600  # seconds of the clock: a wait for what never comes
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_RUNS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"}
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}


class Hang(BaseException):
    """An input took longer than it may."""


@dataclass
class Judge:
    """folder: the only one that may be written to.  found: class of failures -> their number, the shortest input."""

    folder: Path
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    _wrong: list[str] = field(default_factory=list)
    _watching: bool = False

    def __post_init__(self) -> None:
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, _hang)
        signal.signal(signal.SIGALRM, _hang)

    def __call__(self, kind: str, text: object, subject: Callable[[], object]) -> None:
        """Run a subject on an input, and count how it ended.  text: the input, to be shown."""
        self._wrong.clear()
        outcome = "works"
        try:
            with self._watched(), _no_longer_than(SECONDS):
                subject()
        except InternalError as error:
            self._wrong.append(_signature("InternalError", error))
        except SplitcError as error:
            outcome = "refused"
            self._wrong += _unclear("\n".join([str(error), *getattr(error, "__notes__", ())]))
        except Hang as error:
            self._wrong.append(_signature("hang", error))
        except SystemExit as error:
            self._wrong.append(f"SystemExit {error.code}")
        except Exception as error:
            self._wrong.append(_signature(type(error).__name__, error))
        self.note(kind, text, outcome, self._wrong)

    def note(self, kind: str, text: object, outcome: str, wrongs: Iterable[str]) -> None:
        """Count how an input ended: it works, is refused, or is wrong in these ways."""
        for wrong in dict.fromkeys(wrongs):
            outcome, shown = "wrong", repr(text)
            number, before = self.found.get(f"{kind}: {wrong}", (0, shown))
            self.found[f"{kind}: {wrong}"] = number + 1, min(before, shown, key=len)
        counts = self.outcomes.setdefault(kind, {"works": 0, "refused": 0, "wrong": 0})
        counts[outcome] += 1

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._watching = True
        try:
            yield
        finally:
            self._watching = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event in _RUNS:
            self._wrong.append(f"{event} was called")
        elif event == "exec" and MARK in str(getattr(arguments[0], "co_names", ())):
            self._wrong.append("a text became code")
        elif (event == "open" and arguments[2] and arguments[2] & _WRITES) or event in _CHANGES:
            path = arguments[0]
            if isinstance(path, (str, bytes, os.PathLike)) and not self._may_be_written(os.fsdecode(path)):
                self._wrong.append(f"{event} outside of the folder: {os.fsdecode(path)}")

    def _may_be_written(self, path: str) -> bool:
        allowed = (str(self.folder), "/dev/null")
        return os.path.abspath(path).startswith(allowed) or "__pycache__" in path


def _hang(number: int, frame: object) -> None:
    raise Hang


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _unclear(text: str) -> list[str]:
    """What is wrong with the text of an error."""
    if len(text.split()) < 4:
        return [f"an error of few words: {text!r}"]
    if "Traceback" in text or " object at 0x" in text or "<class '" in text:
        return [f"an error that shows Python's insides: {text[:60]!r}"]
    return []


def _signature(name: str, error: BaseException) -> str:
    """An error's class and the innermost line of splitc."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/fuzz/" not in each.filename]
    own = [each for each in frames if any(part in each.filename for part in ("splitc", "passes", "cost_models"))]
    where = "".join(f" at {Path(at.filename).name}:{at.lineno} in {at.name}" for at in (own or frames)[-1:])
    return f"{name}{where}: {str(error)[:80]!r}" if name != "hang" else f"{name}{where}"
