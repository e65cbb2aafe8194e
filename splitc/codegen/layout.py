"""Lay generated statements out in lines of at most 120 columns, with their comments in one column."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from splitc.ir.names import printable, prose
from splitc.version import __version__

WIDTH = 120
_GAP = "  # "

Line = tuple[str, str]
"""A statement and its comment."""


def block(head: str, body: Iterable[Line], note: str = "") -> list[Line]:
    """A statement with others inside."""
    return [(head, note), *((f"    {text}" if text else "", beside) for text, beside in body)]


def aligned(body: Sequence[Line], indent: str) -> list[str]:
    """Statements with their comments in one column, beyond it where a line has room, else above.

    One that is longer than a line is broken inside its longest brackets.
    """
    body = [(text, printable(note)) for text, note in body]
    room = WIDTH - len(indent)
    fitting = [(text, note) for text, note in body if note and len(text) + len(_GAP) + len(note) <= room]
    column = max((len(text) for text, _ in fitting), default=0)
    lines: list[str] = []
    for text, note in body:
        if (text, note) in fitting:
            own = min(column, room - len(_GAP) - len(note))
            lines.append(f"{text:<{own}}{_GAP}{note}")
        else:
            inner = " " * (len(text) - len(text.lstrip()))
            lines += [*([f"{inner}# {note}"] if note else []), *wrapped(text, room)]
    return [f"{indent}{line}" if line else "" for line in lines]


def wrapped(text: str, width: int) -> list[str]:
    """`text`, or the same in several lines of at most `width` where brackets allow it."""
    if len(text) <= width or (span := _longest_brackets(text)) is None:
        return [text]
    start, end = span
    indent = " " * (len(text) - len(text.lstrip()))
    inner, room = list[str](), width - len(indent) - 4
    for item in _items(text[start + 1 : end]):
        if inner and len(inner[-1]) + 1 + len(item) <= room:
            inner[-1] += f" {item}"
        else:
            inner += wrapped(item, room)
    return [text[: start + 1], *(f"{indent}    {line}" for line in inner), f"{indent}{text[end:]}"]


def docstring(title: str, rest: Sequence[str] = ()) -> list[str]:
    """A file's docstring of any texts: the title, which may take several lines, and lines after an empty one."""
    whole = f'"""{prose(title)}  Written by splitc {__version__}; yours to edit.'
    lines = textwrap.wrap(whole, WIDTH - 3, break_long_words=False, break_on_hyphens=False)
    return [*lines, "", *map(prose, rest), '"""'] if rest else [*lines[:-1], f'{lines[-1]}"""']


def _longest_brackets(text: str) -> tuple[int, int] | None:
    """Where the longest of the outermost pairs of brackets begins and ends; None where all are empty."""
    found, start = [], 0
    for index, (character, depth) in enumerate(_depths(text)):
        if character in "([{" and depth == 1:
            start = index
        elif character in ")]}" and depth == 0 and index > start + 1:
            found.append((start, index))
    return max(found, key=lambda span: span[1] - span[0], default=None)


def _items(text: str) -> list[str]:
    """What stands between the outermost commas, each with its comma."""
    cuts = [0, *(index + 1 for index, each in enumerate(_depths(text)) if each == (",", 0)), len(text)]
    return [item for a, b in pairwise(cuts) if (item := text[a:b].strip())]


def _depths(text: str) -> Iterator[tuple[str, int]]:
    """Each character, and how many brackets are open after it; of string literals one that means nothing."""
    text = re.sub(r'"(\\.|[^"\\])*"', lambda quoted: "_" * len(quoted[0]), text)
    return zip(text, accumulate((each in "([{") - (each in ")]}") for each in text), strict=True)
