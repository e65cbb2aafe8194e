"""Find the model that a command names: `path/model.py[:name]` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from splitc.errors import CaptureError

_OFFERS = (
    "it should offer `model` (a Module or a function without arguments that returns one), "
    "and may offer `loss`, `example`, `target`"
)


@dataclass(frozen=True)
class ModelFile:
    """What a model file offers, ready for `compile`."""

    name: str
    model: nn.Module
    example: Any
    target: Any
    loss: Any


def load_model(argument: str, sizes: str | None = None) -> ModelFile:
    """Load a model argument.  sizes: `32x3x224x224`, an example of that shape in place of the file's own.

    Raises CaptureError that says what is missing and how it should look.
    """
    module, attribute, where = _import(argument)
    offered = getattr(module, attribute, None)
    if offered is None:
        models = [
            n
            for n, v in vars(module).items()
            if isinstance(v, nn.Module)
            or (inspect.isclass(v) and issubclass(v, nn.Module) and v.__module__ == module.__name__)
        ]
        hint = f"; did you mean {argument.partition(':')[0]}:{models[0]}?" if models else ""
        raise CaptureError(f"{where} has no {attribute!r}{hint}; {_OFFERS}")
    model = _made(offered, f"{where}: {attribute}")
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{where}: {attribute} is a {type(model).__name__}, not a torch.nn.Module; {_OFFERS}")
    loss, example, target = (getattr(module, name, None) for name in ("loss", "example", "target"))
    if inspect.isclass(loss):
        loss = loss()
    example = _made(example, f"{where}: example")
    target = _made(target, f"{where}: target")
    if sizes is not None:
        example, target = _sized(sizes, example, target, model, loss)
    if example is None:
        raise CaptureError(f"{where} has no `example`; add one (a tuple of tensors), or give --input 32x3x224x224")
    return ModelFile(_title(model, module), model, example, target, loss)


def _import(argument: str) -> tuple[ModuleType, str, str]:
    path, _, name = argument.partition(":")
    if path.endswith(".py"):
        file = Path(path)
        if not file.is_file():
            raise CaptureError(
                f"there is no file {path}; a model is given as path/model.py[:name] or package.module:name"
            )
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        sys.path.insert(0, str(file.resolve().parent))
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise CaptureError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
        return module, name or "model", path
    if not name:
        raise CaptureError(f"{argument!r} names no model; write path/model.py[:name] or package.module:name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(path), name, path
    except ImportError as error:
        raise CaptureError(f"the module {path} cannot be imported: {error}") from error


def _made(value: Any, where: str) -> Any:
    """What a function without arguments (or a class) returns; anything else as it is."""
    if isinstance(value, nn.Module) or not callable(value):
        return value
    try:
        return value()
    except Exception as error:
        raise CaptureError(
            f"{where}() fails: {type(error).__name__}: {error}; it must work without arguments"
        ) from error


def parse_sizes(text: str) -> tuple[int, ...]:
    """`32x3x224x224` -> (32, 3, 224, 224)."""
    if not re.fullmatch(r"\d+(x\d+)*", text) or "0" in text.split("x"):
        raise CaptureError(f"--input {text}: write sizes as in 32x3x224x224, the first one is the batch")
    return tuple(map(int, text.split("x")))


def _sized(sizes: str, example: Any, target: Any, model: nn.Module, loss: Any) -> tuple[Any, Any]:
    """A random example of the given sizes; the target is cut or repeated to its batch."""
    shape = parse_sizes(sizes)
    like = example[0] if isinstance(example, (tuple, list)) and example else example
    if isinstance(like, torch.Tensor) and not like.dtype.is_floating_point:
        made = torch.randint(0, int(like.max()) + 1, shape, dtype=like.dtype)
    else:
        dtype = (
            like.dtype if isinstance(like, torch.Tensor) else next((p.dtype for p in model.parameters()), torch.float32)
        )
        made = torch.randn(shape, dtype=dtype)
    if loss is not None and target is None:
        raise CaptureError("--input needs a `target` in the model file, which is cut or repeated to the batch; add one")
    return (made,), _fit(target, shape[0])


def _fit(target: Any, batch: int) -> Any:
    if isinstance(target, torch.Tensor):
        return torch.cat([target] * -(-batch // target.shape[0]))[:batch]
    return tuple(_fit(part, batch) for part in target) if isinstance(target, (tuple, list)) else target


def _title(model: nn.Module, module: ModuleType) -> str:
    """The name in reports and headers: the class, unless that says nothing."""
    name = type(model).__name__
    return module.__name__.rpartition(".")[2] if name in ("Sequential", "Module") else name
