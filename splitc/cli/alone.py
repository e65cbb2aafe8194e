"""Run a model as it is, when splitc could not trace it: a model that fails by itself is not a bug of splitc."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import splitc
from splitc.capture.capture import as_arguments, target_names
from splitc.cli.model_file import ModelFile
from splitc.errors import CaptureError
from splitc.ir.program import under_autocast

_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, splitc.__file__))


def runs_alone(file: ModelFile, autocast: torch.dtype | None) -> CaptureError | None:
    """None when model and loss run on a few of the example's rows; else what they fail with, and where."""
    model, loss = file.model, file.loss
    inputs = as_arguments(model, file.example)
    targets = target_names(file.target, inputs)
    few = {name: _few(value) for name, value in inputs.items()}
    what = "the model"
    try:
        with under_autocast(model, autocast):
            value = model(**few)
            if loss is not None:
                what = "the loss"
                value = loss(value, *(_few(target) for target in targets.values()))
        what = "the backward pass"
        value.sum().backward()
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        where = user_line(error)
        at = f" at {where}" if where else ""
        under = "" if autocast is None else " under autocast"
        return CaptureError(
            f"{what} of {file.name} does not run on its example{under}{at}: {type(error).__name__}: {text}\n"
            f"  example: {_described(inputs)}" + (f"; target: {_described(targets)}" if targets else "")
        )
    finally:
        model.zero_grad(set_to_none=True)
    return None


def user_line(error: BaseException) -> str:
    """`net.py:12 (return self.fc(x))`: the innermost line of the user's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")) and "site-packages" not in frame.filename:
            line = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
            return f"{Path(frame.filename).name}:{frame.lineno}" + (f" ({line})" if line else "")
    return ""


def _few(value: Any) -> Any:
    return value[:2] if isinstance(value, torch.Tensor) and value.dim() else value


def _described(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    )
