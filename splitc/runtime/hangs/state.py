"""What a rank does at a moment, read from the stack of its program and from what its transport notes."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..failed_step import of_build, written

_RUNTIME = Path(__file__).parents[1]
_WORKER = str(_RUNTIME / "worker.py"), str(_RUNTIME / "training.py")
_PATHS = (sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_NOT_OF_THE_USER = (*_PATHS, str(Path(torch.__file__).parent), str(_RUNTIME), "<frozen")


@dataclass(frozen=True)
class State:
    """What a rank does.

    steps, evaluated: made so far, and batches evaluated.
    doing: the method of its worker that runs; "": none, it is in the user's code.
    what, ends: the operation that it is blocked in, and the ranks at its ends; "": it is in none.
    seconds: since when, or since the last operation ended.  allowed: that it waits before it asks why.
    line: of the build, the innermost that runs.  own: the 4 innermost lines of the user's code.
    """

    steps: int
    evaluated: int
    doing: str
    what: str
    ends: Sequence[int]
    seconds: float
    allowed: float
    line: str
    own: Sequence[str]


def where(thread: int, program: object) -> tuple[str, str, tuple[str, ...]]:
    """`doing`, `line` and `own` of a thread of this process."""
    doing, line, own = "", "", list[str]()
    innermost = sys._current_frames().get(thread)
    for frame, at in traceback.walk_stack(innermost) if innermost is not None else ():
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if of_build(program, frame):
            line = line or written(frame, at)
        elif file in _WORKER and not name.startswith("_"):
            doing = name
        elif not file.startswith(_NOT_OF_THE_USER):
            own.append(written(frame, at, function=True))
    return doing, line, tuple(own[:4])
