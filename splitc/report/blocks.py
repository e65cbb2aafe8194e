"""Collapse the rows of repeated blocks: hide `layers.1` to `layers.23` if their rows equal those of `layers.0`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

Row = tuple[str, tuple[str, ...]]
"""A layer's name and the other cells of its row."""


@dataclass(frozen=True)
class Hidden:
    """Blocks equal to the one before them: `prefix`.`first` to `prefix`.`last`, with `rows` layers in all."""

    prefix: str
    first: int
    last: int
    rows: int

    def __str__(self) -> str:
        start = f"{self.prefix}." if self.prefix else ""
        to = f" to {start}{self.last}" if self.last > self.first else ""
        return f"{start}{self.first}{to}: as {start}{self.first - 1}, {self.rows} rows hidden"


def collapse(rows: Sequence[Row]) -> list[int | Hidden]:
    """Return the positions of the rows that are shown, in order, each run of repeated blocks as one `Hidden`."""
    found: list[int | Hidden] = []
    at = 0
    while at < len(rows):
        size, hidden = _repeated(rows, at)
        found += range(at, at + size)
        at += size
        if hidden is not None:
            found.append(hidden)
            at += hidden.rows
    return found


def _repeated(rows: Sequence[Row], at: int) -> tuple[int, Hidden | None]:
    """Return the number of rows of the block at `at` and the repetitions that follow; (1, None) outside a block."""
    words = rows[at][0].split(".")
    for position, number in [(k, int(word)) for k, word in enumerate(words) if word.isdigit()]:
        prefix, repeats = words[:position], 0
        first = _block(rows, at, prefix, number)
        if not first or (at and _block(rows, at - 1, prefix, number)):
            continue  # the middle of a block
        while _block(rows, at + (repeats + 1) * len(first), prefix, number + repeats + 1) == first:
            repeats += 1
        if repeats * len(first) >= 2:
            hidden = Hidden(".".join(prefix), number + 1, number + repeats, repeats * len(first))
            return len(first), hidden
    return 1, None


def _block(rows: Sequence[Row], at: int, prefix: Sequence[str], number: int) -> list[Row]:
    """Return the rows from `at` on whose names begin with `prefix.number`, with the rest of their names."""
    head = ".".join([*prefix, str(number)])
    within = takewhile(lambda row: f"{row[0]}.".startswith(f"{head}."), islice(rows, at, None))
    return [(name[len(head) :], cells) for name, cells in within]
