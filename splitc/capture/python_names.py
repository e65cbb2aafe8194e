"""What Python shows of code and objects: whose name tells what they do, which state is hidden in C, what code names."""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

BY_NAME = {
    "__future__", "_operator", "abc", "builtins", "cmath", "collections", "contextlib", "copy", "copyreg",
    "dataclasses", "enum", "functools", "itertools", "math", "numbers", "operator", "splitc", "string", "torch",
    "types", "typing", "warnings",
}  # fmt: skip
"""Top modules whose functions and classes do the same under the same name, in one version."""

UNSEEN = {
    "__builtins__", "__globals__", "__import__", "__subclasses__", "_getframe", "compile", "currentframe",
    "default_generator", "eval", "exec", "get_rng_state", "globals", "import_module", "initial_seed", "input", "load",
    "load_state_dict_from_url", "locals", "modules", "open",
}  # fmt: skip
"""Names by which code reads what a digest of it would not show."""

BY_STRING = {"__dict__", "attrgetter", "dir", "getattr", "hasattr", "vars"}
"""Names by which code may read an attribute that it does not name."""

OF_CLASS = {
    "__annotations__", "__dict__", "__doc__", "__orig_bases__", "__parameters__", "__repr__", "__weakref__",
    "_abc_impl",
}  # fmt: skip
"""What a class has that decides nothing that its objects compute."""

IN_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)


def is_by_name(value: Any) -> bool:
    """Whether a function or class is the one that its name says, of a module that counts by name."""
    if top_module(value) not in BY_NAME:
        return False
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    own = vars(value).values() if isinstance(value, type) else ()
    return found is value and all(top_module(each) in BY_NAME for each in own if isinstance(each, types.FunctionType))


def top_module(value: Any) -> str:
    """`torch` of a function of `torch.nn.functional`."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def is_known(module: types.ModuleType) -> bool:
    """Whether what a module defines counts by name."""
    return module.__name__.partition(".")[0] in BY_NAME


def is_stateless(owner: Any) -> bool:
    """Whether what a function written in C is bound to is a module or a class."""
    return owner is None or isinstance(owner, (types.ModuleType, type))


def is_in_c(cls: type) -> bool:
    """Whether a class is written in C: it has methods of its own that are, or a constructor that is."""
    own = vars(cls)
    return isinstance(own.get("__new__"), types.BuiltinFunctionType) or any(
        isinstance(each, IN_C) and each.__objclass__ is cls for each in own.values()
    )


def slots_of(cls: type) -> tuple[str, ...]:
    """The names of a class's own slots, as `getattr` takes them."""
    found = vars(cls).get("__slots__", ())
    names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(
        f"_{cls.__name__.lstrip('_')}{n}" if n[:2] == "__" != n[-2:] else n for n in names if n[:6] != "__dict"
    )


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's variable has been assigned."""
    try:
        return cell.cell_contents is not None or True
    except ValueError:
        return False


def names_in(code: types.CodeType) -> frozenset[str]:
    """All names of globals and attributes in a code object and those within it."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def imports_in(code: types.CodeType) -> list[str]:
    """The modules that a function imports when it runs."""
    found = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    return found + [name for each in code.co_consts if isinstance(each, types.CodeType) for name in imports_in(each)]
