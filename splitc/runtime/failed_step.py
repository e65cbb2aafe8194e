"""Where a step failed: its number, and the line of the generated file, which a person may have edited."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import Any


@contextmanager
def failed_step(program: object, number: int) -> Iterator[None]:
    """Add the step's number, and the innermost line of the build that `program` is of, to an error that passes."""
    try:
        yield
    except Exception as error:
        line = ""
        for frame, at in traceback.walk_tb(error.__traceback__):
            if of_build(program, frame):
                line = f", {written(frame, at)}"
        error.add_note(f"in step {number}{line}")
        raise


def of_build(program: object, frame: FrameType) -> bool:
    """Whether a frame runs a file of the build that `program` is of."""
    loader = _loader(getattr(program, "__dict__", {}))
    return loader is not None and _loader(frame.f_globals) is loader


def written(frame: FrameType, at: int, function: bool = False) -> str:
    """`conv.py, line 83: cut0 = comm.recv(...)`, and with its `function`."""
    (summary,) = traceback.StackSummary.extract([(frame, at)])
    name = PurePath(summary.filename).name.removeprefix("<generated ").rstrip(">")
    inside = f", in {summary.name}" * function
    return f"{name}, line {at}{inside}: {' '.join((summary.line or '').split())}"


def _loader(module: dict[str, Any]) -> object:
    return getattr(module.get("__spec__"), "loader", None)
