"""Find Python state that a model or its loss changes: a graph would keep what it was in one call."""

from __future__ import annotations

import enum
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_ITEMS = 20_000  # of all containers together; what is beyond shows in what the model computes
_LARGE = 1 << 26  # bytes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum)
_OF_MODULES = {"training", "_parameters", "_buffers", "_modules"}


def python_state(model: nn.Module, loss: Any) -> dict[str, object]:
    """Every value that a call may change, by the name that a user knows it by.

    Attributes of modules, of their classes and of objects, items of containers, variables of closures, and globals that
    forward reads; the states of random generators; of tensors two sums.
    """
    roots = [("", model)] + ([("loss", loss)] if isinstance(loss, nn.Module) else [])
    state = _State({id(module) for _, root in roots for module in root.modules()})
    for prefix, root in roots:
        for path, module in root.named_modules(prefix=prefix):
            for name, value in vars(module).items():
                if name not in _OF_MODULES:
                    state.add(f"{path}.{name}".lstrip("."), value)
            for cls in _users_classes(module):
                for name, value in vars(cls).items():
                    if isinstance(value, FunctionType):
                        state.add_globals(value)
                    elif not name.startswith("__"):
                        state.add(f"{cls.__name__}.{name}", value)
    state.add("loss", loss)
    return state.found


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names whose values differ."""
    return [name for name in {**before, **after} if before.get(name, _state) != after.get(name, _state)]


def is_tensor_state(value: object) -> bool:
    """Whether the value stands for a tensor."""
    return type(value) is _TensorSums


class _TensorSums(tuple[Any, ...]):
    """Shape and sums of a tensor."""


def _state() -> None:
    """Differs from every value."""


def _users_classes(module: nn.Module) -> Iterator[type]:
    for cls in type(module).__mro__:
        if (cls.__module__ or "").partition(".")[0] not in ("torch", "builtins", "typing", "abc"):
            yield cls


class _State:
    def __init__(self, seen: set[int]) -> None:
        self.found: dict[str, object] = {}
        self._seen = seen
        self._alive: list[Any] = []

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.found[name] = value if value == value else "nan"
        elif isinstance(value, Tensor):
            if isinstance(value, FakeTensor):  # of a compiled program, which the user's module holds
                return
            wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
            positions = torch.arange(1, wide.numel() + 1, device=wide.device, dtype=torch.float64)
            sums = (wide.sum(), (wide.flatten() * positions.sqrt()).sum()) if wide.device.type != "meta" else ()
            self.found[name] = _TensorSums((tuple(value.shape), *(repr(s.item()) for s in sums)))
        elif id(value) not in self._seen and len(self.found) < _ITEMS:
            self._seen.add(id(value))
            self._alive.append(value)  # its id stays its own
            self._add_parts(name, value)

    def _add_parts(self, name: str, value: Any) -> None:
        if isinstance(value, (Mapping, list, tuple, deque)):
            self.found[name] = len(value)
            for key, item in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
                self.add(f"{name}[{key!r}]", item)
        elif isinstance(value, (set, frozenset, itertools.count)):
            self.found[name] = repr(sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value)
        elif isinstance(value, random.Random):
            self.found[f"the random generator {name}"] = hash(value.getstate())
        elif isinstance(value, torch.Generator):
            self.found[f"the random generator {name}"] = hash(value.get_state().numpy().tobytes())
        elif bits := getattr(value, "bit_generator", getattr(value, "_bit_generator", None)):  # of numpy
            self.found[f"the random generator {name}"] = repr(bits.state)
        elif hasattr(value, "tobytes"):
            self.found[name] = hash(value.tobytes()) if getattr(value, "nbytes", 0) < _LARGE else 0
        elif isinstance(value, MethodType):
            self.add(name, value.__func__)
            self.add(name, value.__self__)
        elif isinstance(value, FunctionType):
            self._add_function(name, value)
        elif type(value).__module__.partition(".")[0] not in sys.stdlib_module_names:
            slots = [slot for cls in type(value).__mro__ for slot in getattr(cls, "__slots__", ())]
            for key in (*getattr(value, "__dict__", ()), *(slot for slot in slots if hasattr(value, slot))):
                self.add(f"{name}.{key}", getattr(value, key))

    def _add_function(self, name: str, function: FunctionType) -> None:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != type(cell)():
                self.add(f"{variable} of {name}", cell.cell_contents)
        for k, default in enumerate(function.__defaults__ or ()):
            self.add(f"default {k} of {name}", default)
        self.add_globals(function)

    def add_globals(self, function: FunctionType) -> None:
        """The globals that a function reads; modules, functions and classes are followed for its own file only."""
        if (function.__module__ or "").partition(".")[0] in ("torch", "splitc"):
            return
        for variable in sorted(_names_in(function.__code__)):
            value = function.__globals__.get(variable)
            if value is None or isinstance(value, (type, type(sys), nn.Module)):
                continue
            if not isinstance(value, FunctionType) or value.__module__ == function.__module__:
                self.add(f"the global {variable}", value)


def _names_in(code: CodeType) -> frozenset[str]:
    """All names of globals and attributes in a code object and those within it."""
    return frozenset(code.co_names).union(*[_names_in(each) for each in code.co_consts if isinstance(each, CodeType)])
