"""Tables and lists in text of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

import tabulate as tables

WIDTH = 80
tables.MIN_PADDING = 0  # columns are as narrow as their text


def table(headers: str, rows: Sequence[Sequence[str]], elastic: int = 0, least: int = 8) -> str:
    """Write a table that fits WIDTH: the texts of column `elastic` are cut as far as needed, but not below `least`.

    headers: separated by `|`; `#` marks columns of numbers.
    """
    names = headers.split("|")
    align = ["right" if name.startswith("#") else "left" for name in names]
    names = [name.removeprefix("#") for name in names]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    room = max(least, WIDTH - sum(widths) + widths[elastic] - 2 * (len(widths) - 1))
    cut = [[*row[:elastic], short(row[elastic], room), *row[elastic + 1 :]] for row in rows]
    text: str = tables.tabulate(cut, names, disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + ("  " if indent else ""))


def short(name: str, width: int) -> str:
    return name if len(name) <= width else "..." + name[-(width - 3) :]


def runs(sizes: Sequence[int]) -> str:
    """Format batch sizes: `(4, 4, 3)` -> `4, 4, 3`; `100 x 128` for many equal ones."""
    if len(sizes) > 8 and len(set(sizes)) <= 4:
        return ", ".join(f"{sizes.count(size)} x {size}" for size in dict.fromkeys(sizes))
    return ", ".join(map(str, sizes))


def by_ranks(rows: Iterable[tuple[int, Sequence[str]]]) -> list[list[str]]:
    """Join the rows of ranks that are equal: `[[ranks 0-2, ...], ...]`."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, cells in rows:
        alike.setdefault(tuple(cells), []).append(rank)
    return [[rank_list(ranks), *cells] for cells, ranks in alike.items()]


def rank_list(ranks: Sequence[int]) -> str:
    """Format ranks as ranges, `(0, 1, 2)` -> `ranks 0-2`; at most four ranges, then the number of ranks left out."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = groupby(enumerate(ranks), lambda each: each[1] - each[0])
    pieces = [[rank for _, rank in run] for _, run in in_a_row]
    shown = [f"{piece[0]}-{piece[-1]}" if len(piece) > 1 else str(piece[0]) for piece in pieces[:4]]
    more = sum(map(len, pieces[4:]))
    return f"ranks {' '.join(shown)}" + (f" +{more}" if more else "")
