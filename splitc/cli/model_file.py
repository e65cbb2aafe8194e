"""Find the model that a command names, `path/model.py[:name]` or `package.module:name`, and run it by itself."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from splitc.capture.example.example import Example
from splitc.capture.example.loss_value import takes
from splitc.capture.source_lines import frame_of
from splitc.cli.example_input import check_example, check_target, evaluated, parse_sizes, resized, rows, takes_batch
from splitc.cli.names import FORM, model_name
from splitc.errors import CaptureError
from splitc.ir.autocast import under_autocast
from splitc.ir.names import near_name
from splitc.runtime.transport.base import describe

_OFFERS = (
    "it should offer `model` (a Module or a function without arguments that returns one), "
    "and may offer `loss`, `example`, `target`"
)
_TAKEN = (*sys.stdlib_module_names, "torch", "numpy", "splitc")


@dataclass(frozen=True)
class ModelFile:
    """What a model file offers, ready to be compiled.  code: where the model is imported, "module:name"."""

    name: str
    model: nn.Module
    example: Example
    code: str | None = None


def load_model(argument: str, sizes: str | None = None) -> ModelFile:
    """Load a model argument.  sizes: `4x3x224x224`, the shape of an example in place of that of the file.

    Raises CaptureError that says what is missing and gives an example of it.
    """
    asked = None if sizes is None else parse_sizes(sizes)
    module, attribute, where = _import(argument)
    model = _model(module, attribute, argument, where)
    loss = _loss(getattr(module, "loss", None), where)
    inputs, target = _data(module, where, model, asked)
    if loss is not None and target is None and not takes(loss, 1):
        raise CaptureError(
            f"{where} has a `loss` but no `target`; add one: a tensor with a row for each example, or a function of "
            f"`batch` that makes it; or let the loss take the output alone"
        )
    if loss is None and target is not None:
        raise CaptureError(
            f"{where} has a `target` but no `loss`; add one, `loss = torch.nn.functional.cross_entropy` for example; "
            f"or let the model return the loss, and make the target a part of `example`"
        )
    code = f"{module.__name__}:{attribute}"
    return ModelFile(_title(model, module), model, Example.bind(model, inputs, target, loss), code)


# -- what the module offers --------------------------------------------------------------------------------------------


def _model(module: ModuleType, attribute: str, argument: str, where: str) -> nn.Module:
    if not hasattr(module, attribute):
        models = _models(module)
        path = argument if argument.endswith(".py") else argument.rpartition(":")[0]
        hint = near_name(attribute, models) or (f"did you mean {path}:{models[0]}? " if models else "")
        raise CaptureError(f"{where} has no {attribute!r}; {hint}{_OFFERS}")
    model = evaluated(getattr(module, attribute), f"{where}: {attribute}")
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{where}: {attribute} is a {type(model).__name__}, not a torch.nn.Module; {_OFFERS}")
    return model


def _models(module: ModuleType) -> list[str]:
    """Names of the modules, and of the module classes that the file defines."""
    defined = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
    classes = [n for n, v in defined.items() if n[0] != "_" and inspect.isclass(v) and issubclass(v, nn.Module)]
    return [n for n, v in vars(module).items() if isinstance(v, nn.Module)] + classes


def _loss(loss: Any, where: str) -> Any:
    if inspect.isclass(loss):
        loss = evaluated(loss, f"{where}: loss")
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"{where}: loss is a {type(loss).__name__}; give a function of (output, target) or a loss module, "
            f"torch.nn.functional.cross_entropy for example"
        )
    return loss


def _data(
    module: ModuleType, where: str, model: nn.Module, sizes: tuple[tuple[int, ...], ...] | None
) -> tuple[Any, Any]:
    """Inputs and target, of the sizes asked for."""
    offered, batch = getattr(module, "example", None), sizes[0][0] if sizes else None
    if offered is None and sizes is None:
        raise CaptureError(f"{where} has no `example`; add one (a tuple of tensors), or give --input 32x3x224x224")
    if offered is None and sizes is not None and len(sizes[0]) == 1:
        raise CaptureError(f"{where} has no `example`; give all sizes, as in --input 32x3x224x224")
    example = evaluated(offered, f"{where}: example", batch)
    if offered is not None:
        check_example(example, where)
    if sizes is not None:
        example = resized(sizes, example, model)
    offered = getattr(module, "target", None)
    target = evaluated(offered, f"{where}: target", batch)
    if target is not None:
        if batch is not None and not (callable(offered) and takes_batch(offered)):
            target = rows(target, batch)
        check_target(target, where)
    return example, target


def _title(model: nn.Module, module: ModuleType) -> str:
    """The name in reports and headers: the class, or the file for a Sequential."""
    name = type(model).__name__
    return module.__name__.rpartition(".")[2] if name in ("Sequential", "Module") else name


# -- finding the module ------------------------------------------------------------------------------------------------


def _import(argument: str) -> tuple[ModuleType, str, str]:
    """The module, the name of the model in it, and its name in errors."""
    file, name, attribute = model_name(argument)
    if file is not None:
        return _from_file(file), attribute, name
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    with _import_errors(name):
        module = importlib.import_module(name)
    return module, attribute, name


def _from_file(file: Path) -> ModuleType:
    name = file.stem if file.stem not in _TAKEN else f"{file.stem}_file"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    if (folder := str(file.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        with _import_errors(str(file)):
            exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)  # a loader may take a stale cached one
    except CaptureError:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


@contextmanager
def _import_errors(where: str) -> Iterator[None]:
    """Turn any error of importing `where` into a CaptureError that names the line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CaptureError(f"{where} cannot be imported: {_import_problem(error, where)}") from error


def _import_problem(error: BaseException, where: str) -> str:
    """The error with the user's file and line."""
    if isinstance(error, SyntaxError):
        line = f" ({error.text.strip()})" if error.text else ""
        return f"{type(error).__name__} in {Path(error.filename or where).name}:{error.lineno}{line}: {error.msg}"
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if absent is not None and absent.split(".")[0] == where.split(".")[0]:
        return f"there is no module {absent} here or among the installed packages; {FORM}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith(_IMPORTING)]
    at = f" in {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    missing = (
        "; install it, or run splitc with the Python that has it" if isinstance(error, ModuleNotFoundError) else ""
    )
    if isinstance(error, SystemExit):
        return f"it ends Python itself, by sys.exit{at}; put what is not the model under if __name__ == '__main__'"
    return f"{type(error).__name__}{at}: {error}{missing}"


_IMPORTING = (str(Path(importlib.__file__).parent),)


# -- running it --------------------------------------------------------------------------------------------------------


def runs_alone(file: ModelFile, autocast: torch.dtype | None) -> CaptureError | None:
    """None when model and loss run on two rows of the example; else their error, with the user's line.

    A model that fails by itself, when it could not be traced, is no bug of splitc.
    """
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
