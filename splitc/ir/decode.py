"""Read the values of files and options as the types that dataclasses declare, and tell all that is wrong with them.

`Annotated[int, at_least(1)]` limits a value beside its type, `Keys` what keys a table may have.  What values mean
together is checked by who reads them, on what was read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from splitc.errors import ArgumentError
from splitc.ir.names import near_name

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_PLAIN = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", tuple: "a list"}
_WORDS: dict[Any, str] = {**_PLAIN, Callable: "a function", Sequence: "a list", Mapping: "a table"}
_WRONG = object()

Path = tuple[str | int, ...]


class Problem(NamedTuple):
    """What is wrong with a value.  path: the keys and indices that lead to it."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{': '.join(f'number {key}' if isinstance(key, int) else str(key) for key in self.path)} {self.what}"


class Limit(NamedTuple):
    """What a value must be beside its type: a test, and words that follow those of the type, or list what is known."""

    holds: Callable[[Any], bool]
    words: str
    known: tuple[Any, ...] = ()


class Keys(NamedTuple):
    """The keys that a table may have, and must.  flat: they stand in the table around it."""

    names: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    flat: bool = False


_NO_LIMIT = Limit(lambda value: True, "")


def at_least(least: float, most: float = sys.float_info.max) -> Limit:
    """A number in a range."""
    return Limit(lambda value: least <= value <= most, f"of at least {least:g}{_and_at_most(most)}")


def more_than(least: float, most: float = sys.float_info.max) -> Limit:
    """A number in a range without its lower end."""
    return Limit(lambda value: least < value <= most, f"of more than {least:g}{_and_at_most(most)}")


def _and_at_most(most: float) -> str:
    return "" if most == sys.float_info.max else f" and at most {most:g}"


Count = Annotated[int, at_least(1)]
Seed = Annotated[int, at_least(-(2**63), most=2**63 - 1)]


def one_of(*known: Any) -> Limit:
    """One of these values."""
    return Limit(lambda value: value in known, f"one of {', '.join(map(str, known))}", known)


def hints_of(cls: Any) -> Mapping[str, Any]:
    """Field -> its type, with its limits."""
    return _hints_of(cls)


@cache
def _hints_of(cls: Any) -> Mapping[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in fields(cls)}


def decode(
    hints: Mapping[str, Any], value: Mapping[str, Any], needed: Iterable[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Key -> value, of those that a table has and that can be read, and everything that is wrong with it.

    Tuples are lists, dataclasses and mappings tables.  What is wrong is missing in a mapping; any other value with
    something wrong in it is of no use.
    """
    problems: list[Problem] = []
    return _table(hints, value, needed, (), problems), problems


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the Python API, which raises ArgumentError for arguments that are not as it declares."""
    name = function.__qualname__.removesuffix(".__init__")
    signature, hints = inspect.signature(function), cache(lambda: get_type_hints(function, include_extras=True))

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound, problems = signature.bind(*args, **kwargs), list[Problem]()
        except TypeError as error:
            known = ", ".join(each for each in signature.parameters if each != "self")
            raise ArgumentError(f"{name}: {error}; its arguments are {known}") from None
        for each in [each for each in bound.arguments if each in hints()]:
            bound.arguments[each] = _decode(hints()[each], bound.arguments[each], (each,), problems)
        if problems:
            raise ArgumentError(f"{name}: {'; '.join(map(str, problems))}")
        return function(*bound.args, **bound.kwargs)

    return called


def typed_fields(cls: type[T]) -> type[T]:
    """A dataclass of the Python API, which raises ArgumentError for fields that are not as it declares."""
    cls.__init__ = typed(cls.__init__)  # type: ignore[method-assign]
    return cls


def _decode(hint: Any, value: Any, path: Path, problems: list[Problem]) -> Any:
    kind, parts, limit, keys = _parted(hint)
    if kind is Union:
        if value is None and NoneType in parts:
            return None
        own = [part for part in parts if part is not NoneType]
        kinds = [part for part in own if _is_a(_parted(part)[0], value)] or own[: len(own) == 1]
        if not kinds:
            problems.append(Problem(path, f"is {_shown(value)}; it must be {_words(hint)}"))
        return _decode(kinds[0], value, path, problems) if kinds else _WRONG
    if not ((limit.known or _is_a(kind, value)) and limit.holds(value)):
        near = near_name(value, map(str, limit.known)) if isinstance(value, str) and len(value) > 3 else ""
        problems.append(Problem(path, f"is {_shown(value)}; {near}it must be {_words(hint)}"))
        return _WRONG
    before = len(problems)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
        values = _table(hints_of(kind), value, needed, path, problems)
        return kind(**values) if len(problems) == before else _WRONG
    if kind is tuple:
        each = [_decode(parts[0], one, (*path, k), problems) for k, one in enumerate(value)]
        return tuple(each) if len(problems) == before else _WRONG
    if kind is Mapping and parts:
        return _table(dict.fromkeys(keys.names or value, parts[1]), value, keys.needed, path, problems)
    return value


def _table(
    hints: Mapping[str, Any], value: Mapping[str, Any], needed: Iterable[str], path: Path, problems: list[Problem]
) -> dict[str, Any]:
    """Key -> value, of those that can be read."""
    known = {key: name for name in hints for key in _keys(name, hints[name])}
    for key in value:
        if key not in known:
            hint = f"{near_name(key, known)}there are {', '.join(known)}"
            problems.append(Problem((*path, key), f"is an unknown key; {hint}"))
    for key in needed:
        if key not in value:
            problems.append(Problem((*path, key), f"is missing; it must be {_words(hints[key])}"))
    found = {key: _decode(hints[key], value[key], (*path, key), problems) for key in hints if key in value}
    for name in {name for key, name in known.items() if key != name}:
        inner = {key: value[key] for key in value if known.get(key) == name}
        found[name] = _decode(hints[name], inner, path, problems)
    return {key: each for key, each in found.items() if each is not _WRONG}


def _keys(name: str, hint: Any) -> tuple[str, ...]:
    """The keys of a field in its table: its name, or those of a flat one."""
    keys = _parted(hint)[3]
    return keys.names if keys.flat else (name,)


@cache
def _parted(hint: Any) -> tuple[Any, tuple[Any, ...], Limit, Keys]:
    """A type, what it is made of, its limit and its keys."""
    bare, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kind = get_origin(bare) or bare
    limit = next((each for each in more if isinstance(each, Limit)), _NO_LIMIT)
    keys = next((each for each in more if isinstance(each, Keys)), Keys())
    return Union if kind is UnionType else kind, get_args(bare), limit, keys


def _is_a(kind: Any, value: Any) -> bool:
    if kind is float:
        is_number = isinstance(value, int | float) and type(value) is not bool
        return is_number and abs(value) <= sys.float_info.max
    if kind in _PLAIN:
        return isinstance(value, list | tuple) if kind is tuple else type(value) is kind
    kinds: Any = (kind, Mapping) if is_dataclass(kind) else kind
    return kind is Any or isinstance(value, kinds)


def _shown(value: Any) -> str:
    """The value, or its type where Python shows no more of it than an address."""
    text = f"{value!r:.60}"
    return f"of type {type(value).__name__}" if " at 0x" in text or "<class" in text else text


def _words(hint: Any) -> str:
    """What a value of a type must be."""
    kind, parts, limit, _ = _parted(hint)
    if kind is Union:
        own = sorted((part for part in parts if part is not NoneType), key=lambda each: _parted(each)[0] not in _PLAIN)
        return " or ".join(dict.fromkeys(map(_words, own)))
    if limit.known:
        return limit.words
    hints: Any = hints_of(kind) if is_dataclass(kind) else {}
    keys = ", ".join(key for each in hints.items() for key in _keys(*each))
    return f"{_WORDS.get(kind, f'a table of {keys}' if keys else f'a {kind.__name__}')} {limit.words}".rstrip()
