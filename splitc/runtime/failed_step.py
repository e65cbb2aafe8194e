"""Where a step failed: its number, and the line of the generated file, which a person may have edited."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any


@contextmanager
def failed_step(program: object, number: int) -> Iterator[None]:
    """Add the step's number, and the innermost line of the build that `program` is of, to an error that passes."""
    try:
        yield
    except Exception as error:
        loader, line = _loader(vars(program)), ""
        for frame, at in traceback.walk_tb(error.__traceback__):
            if loader is not None and _loader(frame.f_globals) is loader:
                (summary,) = traceback.StackSummary.extract([(frame, at)])
                name = PurePath(summary.filename).name.removeprefix("<generated ").rstrip(">")
                line = f", {name}, line {at}: {' '.join((summary.line or '').split())}"
        error.add_note(f"in step {number}{line}")
        raise


def _loader(module: dict[str, Any]) -> object:
    return getattr(module.get("__spec__"), "loader", None)
