"""Find the line of the user's code that runs an operation or raises: `alexnet.py:30`.

The user's frames are those between the operation and `capture` that belong neither to Python, torch nor splitc.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_CAPTURE = str(Path(__file__).with_name("capture.py"))
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"


def user_line() -> str | None:
    """File and line of the user's innermost frame; None where torch's own code was called (a Sequential, a loss)."""
    return next((_line(f.f_code.co_filename, f.f_lineno) for f in _user_frames()), None)


def line_of(error: BaseException) -> str | None:
    """File and line of the user's innermost frame that `error` passed through."""
    frame = frame_of(error)
    return None if frame is None else _line(frame.filename, frame.lineno)


def frame_of(error: BaseException) -> traceback.FrameSummary | None:
    """The user's innermost frame that `error` passed through."""
    return next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if _is_users(f.filename)), None)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without what torch's dispatcher adds about its backends."""
    return str(error).strip().partition("\n")[0].partition(" This could be because the operator")[0].rstrip(".")


def name_in_user_code(value: object) -> str | None:
    """The local or global variable of the user's code that holds `value`."""
    for frame in _user_frames():
        for variables in (frame.f_locals, frame.f_globals):
            for name, other in variables.items():
                if other is value:
                    return name
    return None


def _user_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return file == "<stdin>"  # the others are code that Python or a library has made
    if file.startswith(_PYTHON):
        return "site-packages" in file and not file.startswith(_LIBRARIES)
    return not file.startswith(_LIBRARIES)


def _line(file: str, number: int | None) -> str:
    return f"{Path(file).name}:{number}"
