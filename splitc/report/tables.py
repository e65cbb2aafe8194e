"""Tables and paragraphs that fit 80 columns, for any length of names."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import tabulate as tables

WIDTH = 80
tables.MIN_PADDING = 0  # columns are as narrow as their text


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str], elastic: int, least: int = 8
) -> str:
    """Write a table that fits WIDTH: the texts of column `elastic` are cut as far as needed, but not below `least`."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    room = max(least, WIDTH - sum(widths) + widths[elastic] - 2 * (len(widths) - 1))
    cut = [[*row[:elastic], short(row[elastic], room), *row[elastic + 1 :]] for row in rows]
    text: str = tables.tabulate(cut, headers, disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""))


def short(name: str, width: int) -> str:
    return name if len(name) <= width else "..." + name[-(width - 3) :]
