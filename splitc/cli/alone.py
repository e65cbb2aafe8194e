"""Run a model eagerly when splitc could not trace it: a model that fails by itself is no bug of splitc."""

from __future__ import annotations

from pathlib import Path

import torch

from splitc.capture.source_lines import frame_of
from splitc.cli.model_file import ModelFile
from splitc.errors import CaptureError
from splitc.ir.autocast import under_autocast
from splitc.runtime.transport.base import describe


def runs_alone(file: ModelFile, autocast: torch.dtype | None) -> CaptureError | None:
    """None when model and loss run on two rows of the example; else their error, with the user's line."""
    model, example = file.model, file.example
    values = example.rows(slice(2))
    what = "the model"
    try:
        with under_autocast(model, autocast):
            output = example.output(model, values)
            what = "the loss"
            loss = example.loss_of(output, values)
        what = "the backward pass"
        loss.sum().backward()
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        where = _user_line(error)
        at = f" at {where}" if where else ""
        under = "" if autocast is None else " under autocast"
        tensors = ", ".join(f"{name} {describe(value)}" for name, value in example.tensors.items())
        return CaptureError(
            f"{what} of {file.name} does not run on its example{under}{at}: {type(error).__name__}: {text}\n"
            f"  example: {tensors}"
        )
    finally:
        model.zero_grad(set_to_none=True)
    return None


def _user_line(error: BaseException) -> str:
    """The innermost line of the user's code: `net.py:12 (return self.fc(x))`."""
    frame = frame_of(error)
    if frame is None:
        return ""
    return f"{Path(frame.filename).name}:{frame.lineno}" + (f" ({frame.line})" if frame.line else "")
