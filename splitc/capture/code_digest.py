"""A digest of a model with all that its Python can read, so that what was found out about it holds while that stays.

Functions count by their bytecode, constants, defaults, closures, and every global and attribute of a module that
they name; classes by all they define; objects by all their attributes; parameters by everything but their numbers; the
example by its shapes and what `generic_data` keeps of it.  What torch and Python's stateless modules define counts by
its name.  An object whose state Python cannot see (of a class written in C: a lock, a generator, a file) has no digest,
nor has a model that reaches one: nothing is kept for it.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example import Example
from splitc.capture.python_names import (
    BY_NAME,
    BY_STRING,
    IN_C,
    OF_CLASS,
    UNSEEN,
    imports_in,
    is_by_name,
    is_filled,
    is_in_c,
    is_known,
    is_stateless,
    names_in,
    slots_of,
    top_module,
)

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range)
_TORCH_ATOMS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CONTAINERS: tuple[type, ...] = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset, types.MappingProxyType)
_PLAIN = (object, dict, OrderedDict, list, tuple, set, frozenset, str, int, float)  # C classes that show their state
_MADE_OF: Mapping[type, tuple[str, ...]] = {
    **dict.fromkeys((*IN_C, types.GetSetDescriptorType, types.MemberDescriptorType), ("__objclass__", "__name__")),
    **dict.fromkeys((staticmethod, classmethod), ("__func__",)),
    types.MethodType: ("__func__", "__self__"),
    property: ("fget", "fset", "fdel"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func", "attrname"),
}
"""Types -> the attributes that an object of theirs is made of."""
_MOST = 100_000  # objects; more take longer than what is saved


class _NoDigest(Exception):
    pass


def code_digest(model: nn.Module, example: Example, *more: object) -> str | None:
    """64 hex digits of the model, its loss, and how its example looks; None where something has no digest."""
    hooks = [v for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global_") and isinstance(v, dict)]
    functions = [v for m in (torch, F, Tensor) for v in vars(m).values() if isinstance(v, types.FunctionType)]
    patched = [function for function in functions if top_module(function) not in BY_NAME]
    if any(hooks) or patched or torch._C._len_torch_function_stack() > 0:
        return None
    try:
        found = _Digest(map(id, example.tensors.values()))
        found.all([model, example.inputs, example.targets, example.loss, example.positional, *more, *_surroundings()])
    except Exception:  # _NoDigest, or an object that cannot be looked at
        return None
    return found.hash.hexdigest()


def _surroundings() -> list[object]:
    """What torch tells of the process."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else None
    return [ranks, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), sys.flags.optimize]


class _Digest:
    """Writes objects into a hash, each once; `looks`: ids of tensors that count by their look."""

    def __init__(self, looks: Iterable[int]) -> None:
        self.hash = hashlib.sha256()
        self._looks = frozenset(looks)
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # kept alive, so that no other one gets their ids

    def all(self, values: Iterable[object]) -> None:
        """Write values, and everything that they reach."""
        self._write(*values)
        for value in self._objects:  # grows meanwhile
            self._text("object")
            self._expand(value)

    def _text(self, *texts: object) -> None:
        for text in texts:
            encoded = str(text).encode("utf-8", "surrogatepass")
            self.hash.update(b"%d:" % len(encoded) + encoded)

    def _write(self, *values: Any) -> None:
        self._text(len(values))
        for value in values:
            if type(value) in _ATOMS or type(value) in _TORCH_ATOMS:
                self._text(type(value).__name__, repr(value))
                continue
            if type(value) in (tuple, frozenset):  # equal constants may be one object or several
                self._text(type(value).__name__)
                self._contents(value)
                continue
            if id(value) not in self._numbers:
                if len(self._objects) == _MOST:
                    raise _NoDigest
                self._numbers[id(value)] = len(self._objects)
                self._objects.append(value)
            self._text("#", self._numbers[id(value)])

    def _expand(self, value: Any) -> None:
        kind = type(value)
        self._text(kind.__name__)
        if isinstance(value, Tensor):
            self._tensor(value)
        elif kind in _CONTAINERS:
            self._contents(value)
        elif kind is types.CodeType:
            self._code(value)
        elif isinstance(value, (types.FunctionType, type)) and is_by_name(value):
            self._text(value.__module__, value.__qualname__)
        elif kind is types.FunctionType:
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif kind is types.BuiltinFunctionType and top_module(value) in BY_NAME and is_stateless(value.__self__):
            self._text(value.__module__, value.__qualname__)
        elif kind is types.BuiltinFunctionType and isinstance(value.__self__, type):
            self._write(value.__self__, value.__name__)
        elif kind in (types.UnionType, types.GenericAlias):
            self._write(repr(value), *value.__args__)
        elif kind in _MADE_OF:
            self._write(*(getattr(value, name) for name in _MADE_OF[kind]))
        elif isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value and is_known(value):
            self._text(value.__name__)
        else:
            self._object(value)

    def _tensor(self, tensor: Tensor) -> None:
        plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or not plain or tensor._backward_hooks:
            raise _NoDigest
        if tensor.grad_fn is not None or tensor._post_accumulate_grad_hooks:
            raise _NoDigest
        self._write(tensor.dtype, tensor.shape, str(tensor.stride()), tensor.device, tensor.requires_grad)
        self._write(vars(tensor))
        if id(tensor) in self._looks:
            self._write(*_look(tensor.detach().cpu()))
            return
        storage = self._numbers.setdefault(-tensor.untyped_storage()._cdata, len(self._numbers))
        self._text("storage", storage, tensor.storage_offset())
        if not isinstance(tensor, nn.Parameter):
            self.hash.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def _contents(self, value: Any) -> None:
        if isinstance(value, (dict, types.MappingProxyType)):
            self._write(getattr(value, "default_factory", None), *(part for item in value.items() for part in item))
        elif isinstance(value, (set, frozenset)):
            if not all(type(each) in _ATOMS for each in value):
                raise _NoDigest  # its order is that of addresses
            self._write(*sorted(value, key=lambda each: (type(each).__name__, repr(each))))
        else:
            self._write(*value)

    def _code(self, code: types.CodeType) -> None:
        if UNSEEN & {*code.co_names}:
            raise _NoDigest
        self._write(code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount, code.co_kwonlyargcount)
        self._write(code.co_posonlyargcount, *code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars)
        self._write(*code.co_consts)

    def _function(self, function: types.FunctionType) -> None:
        cells = function.__closure__ or ()
        self._write(function.__code__, function.__defaults__, function.__kwdefaults__, vars(function))
        self._write(*(cell.cell_contents if is_filled(cell) else "empty cell" for cell in cells))
        names = names_in(function.__code__)
        for name in sorted(names):
            if name in function.__globals__:
                self._text("global", name)
                self._read(function.__globals__[name], names, set())
            elif name in vars(builtins):
                self._write(getattr(builtins, name))
        for name in imports_in(function.__code__):
            if name not in sys.modules:
                raise _NoDigest
            self._read(sys.modules[name], names, set())

    def _read(self, value: Any, names: frozenset[str], seen: set[int]) -> None:
        """Write a global; of a module, what the function names of it."""
        if not isinstance(value, types.ModuleType):
            self._write(value)
        elif id(value) not in seen:
            seen.add(id(value))
            if names & BY_STRING and not is_known(value):
                raise _NoDigest
            for name in sorted(names & {*vars(value)}):
                self._text("attribute", value.__name__, name)
                self._read(getattr(value, name), names, seen)

    def _class(self, cls: type) -> None:
        own = {name: value for name, value in vars(cls).items() if name not in OF_CLASS}
        if is_in_c(cls) and cls not in _PLAIN:
            raise _NoDigest
        self._write(type(cls), cls.__module__, cls.__qualname__, *cls.__bases__, own)

    def _object(self, value: Any) -> None:
        """Any object of Python classes: its class, its attributes, and its contents if it is a container."""
        if any(is_in_c(cls) and cls not in _PLAIN for cls in type(value).__mro__):
            raise _NoDigest
        slots = [name for cls in type(value).__mro__ for name in slots_of(cls)]
        self._write(type(value), getattr(value, "__dict__", None), *slots)
        self._write(*(getattr(value, name, "empty slot") for name in slots))
        for kind in (dict, list, tuple, set, frozenset):
            if isinstance(value, kind):
                self._contents(value)
        for atom in (str, int, float):
            if isinstance(value, atom):
                self._text(atom.__repr__(value))


def _look(tensor: Tensor) -> tuple[object, ...]:
    """What data drawn like `tensor` keep of it: columns of whole numbers with bounds, signs, masks, distributions."""
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    if not values.numel():
        return ()
    columns = values.reshape(-1, values.shape[-1] if values.dim() > 1 else 1)
    (low, high), whole = torch.aminmax(columns, dim=0), (columns == columns.round()).all(0)
    bounds = [(int(a), int(b)) if w else (bool(a < b),) for a, b, w in zip(low, high, whole, strict=True)]
    sums = values.sum(-1)
    masks = [bool((values == number).all(-1).any()) for number in (0, 1)]
    return (
        str(bounds),
        *masks,
        bool(values.isfinite().all()),
        bool(low.min() < high.max()),
        bool(low.min() >= 0),
        bool(high.max() <= 1),
        bool(torch.allclose(sums, torch.ones_like(sums), 1e-3)),
    )
