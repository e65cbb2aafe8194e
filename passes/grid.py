"""The grid of a step: in which order the roles go forward and backward with each microbatch.

A cell is one role's forward or backward of one microbatch.  All ranks follow one order of cells, each its own, and a
value travels at the end of the cell that computes it; so no ranks wait for each other in a circle.

    all_forward    role by role forward with all microbatches, and back; the role of the loss alternates, and holds one
    1f1b           time by time, a cell each taking one: role d of D has D - d microbatches in flight at most, and goes
                   backward as soon as it can (PipeDream-Flush, Narayanan et al. 2021).  Roles that were one have one
                   more than that one had, but for the last of them, so that transitions between them are hidden
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class Cell(NamedTuple):
    """A role's forward or backward of one microbatch.  role: by its place in the order of the roles."""

    role: int
    forward: bool
    microbatch: int


def grid(
    programs: Sequence[Collection[int]], numbers: Sequence[int], order: str, parts: Sequence[int] = ()
) -> list[Cell]:
    """All cells of a step.

    programs: the roles of each rank program; a role's cell occupies every one of them.  numbers: of the microbatches
    of each role, which but for the last one's are the same.  parts: how many of the roles were one; none: 1 each.
    """
    if order != "1f1b":
        return list(_all_forward(numbers))
    parts = parts or [1] * len(numbers)
    flying = [len(parts) - d + (k < count) for d, count in enumerate(parts) for k in range(1, count + 1)]
    return list(_in_turn(programs, numbers, flying))


def _all_forward(numbers: Sequence[int]) -> Iterator[Cell]:
    *others, last = range(len(numbers))
    yield from (Cell(role, True, k) for role in others for k in range(numbers[role]))
    yield from (Cell(last, forward, k) for k in range(numbers[last]) for forward in (True, False))
    yield from (Cell(role, False, k) for role in reversed(others) for k in range(numbers[role]))


def _in_turn(programs: Sequence[Collection[int]], numbers: Sequence[int], flying: Sequence[int]) -> Iterator[Cell]:
    last = len(numbers) - 1
    done: dict[tuple[int, bool], int] = {(role, forward): 0 for role in range(last + 1) for forward in (True, False)}
    while any(done[role, False] < numbers[role] for role in range(last + 1)):
        before, busy, now = dict(done), set[int](), list[Cell]()
        backward = [(role, False) for role in range(last, -1, -1)]
        for role, forward in (*backward, *((role, True) for role in range(last + 1))):
            k, own = before[role, forward], {i for i, roles in enumerate(programs) if role in roles}
            ready = forward and (role == 0 or k < before[role - 1, True])
            ready &= k - before[role, False] < flying[role]
            ready |= not forward and k < before[role, True] and (role == last or k < before[role + 1, False])
            if k < numbers[role] and ready and not own & busy:
                busy |= own
                done[role, forward] += 1
                now.append(Cell(role, forward, k))
        yield from (cell for cell in now if cell.forward)
        yield from (cell for cell in now if not cell.forward)
