"""The batches of a round, or of an update: what is exchanged in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from splitc.ir.program import LoweredProgram
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.verb import When


@dataclass(frozen=True)
class Batch:
    """A batch of those that are accumulated to an update.

    update: the number in its round of the update that it ends, 1 without rounds; 0: nothing follows on it.
    times: so many like it follow each other.  first, last: of its update.
    """

    update: int = 1
    times: int = 1
    first: bool = True
    last: bool = True

    def does(self, action: Action) -> bool:
        """Whether a rank does it: parameters come in the first batch, gradients are exchanged in the last."""
        match action.row.when:
            case When.FIRST_OF_UPDATE:
                return self.first
            case When.LAST_OF_UPDATE:
                return self.last
        return not action.row.in_round


def batches_of_round(program: LoweredProgram, accumulate: int = 1) -> Iterator[Batch]:
    """Yield the batches of a round, or of an update without rounds; equal ones that follow each other as one."""
    for update, times in _of_round(program):
        if accumulate == 1:
            yield Batch(update, times)
            continue
        yield Batch(0, times, last=False)
        if accumulate > 2:
            yield Batch(0, times * (accumulate - 2), first=False, last=False)
        yield Batch(update, times, first=False)


def _of_round(program: LoweredProgram) -> Iterator[tuple[int, int]]:
    """Yield (number in the round, times) of its updates, which without rounds is one; 0: nothing follows on them."""
    turns = {action.update for part in program.rank_programs for action in part.actions if action.update is not None}
    for before, update in pairwise(sorted({0, *turns, program.plan.period})):
        if update - before > 1:
            yield 0, update - before - 1
        yield update, 1
