"""Sum up the rows of a block that a model repeats: `layers.1` to `layers.23` when each is as `layers.0`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

Row = tuple[str, tuple[str, ...]]
"""A layer's name, and what its row shows besides."""


@dataclass(frozen=True)
class Shown:
    """A layer that has a row of its own; `index`: which one it is."""

    index: int


@dataclass(frozen=True)
class Hidden:
    """Blocks that are as the one before: `prefix`.`first` to `prefix`.`last`, `rows` layers in all."""

    prefix: str
    first: int
    last: int
    rows: int

    def __str__(self) -> str:
        start = f"{self.prefix}." if self.prefix else ""
        to = f" to {start}{self.last}" if self.last > self.first else ""
        return f"{start}{self.first}{to}: as {start}{self.first - 1}, {self.rows} rows hidden"


def sum_up(rows: Sequence[Row]) -> list[Shown | Hidden]:
    """The rows in order, with blocks that differ from the one before in their number only in one piece."""
    parts: list[Shown | Hidden] = []
    at = 0
    while at < len(rows):
        size, hidden = _repeated(rows, at)
        parts += [Shown(index) for index in range(at, at + size)]
        at += size
        if hidden is not None:
            parts.append(hidden)
            at += hidden.rows
    return parts


def _repeated(rows: Sequence[Row], at: int) -> tuple[int, Hidden | None]:
    """How many rows the block at `at` has, and the blocks after it that are alike; one row when there is no block."""
    words = rows[at][0].split(".")
    for position, word in enumerate(words):
        if not word.isdigit():
            continue
        prefix, number = words[:position], int(word)
        first = _block(rows, at, prefix, number)
        if at and _block(rows, at - 1, prefix, number):
            continue  # the middle of a block
        if not first:
            continue
        last, end = number, at + len(first)
        for following in count(number + 1):
            if _block(rows, end, prefix, following) != first:
                break
            last, end = following, end + len(first)
        rest = end - at - len(first)
        if rest >= 2:
            return len(first), Hidden(".".join(prefix), number + 1, last, rest)
    return 1, None


def _block(rows: Sequence[Row], at: int, prefix: Sequence[str], number: int) -> list[Row]:
    """The rows from `at` on whose names begin with prefix and number, by what follows in their names."""
    head = ".".join([*prefix, str(number)])
    found: list[Row] = []
    for name, cells in rows[at:]:
        if name != head and not name.startswith(f"{head}."):
            break
        found.append((name[len(head) :], cells))
    return found
