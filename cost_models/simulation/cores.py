"""Cores that several ranks compute on: processor sharing, as an operating system's scheduler does it over time.

Of n ranks that compute, each has min(1, cores / n) of a core.  All have the same share, so one clock tells how much
each has been given since it began: the virtual time of fair queueing (Parekh and Gallager 1993).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Task:
    """Work of a rank.  until: the virtual time at which it is done.  start: when it began (s)."""

    until: float
    number: int
    rank: int
    name: str
    start: float


class Cores:
    """`cores` of them, with tasks that come and go.  Times (s) never go back from call to call."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._tasks: list[Task] = []
        self._now = self._given = 0.0
        self._number = 0

    def add(self, rank: int, name: str, seconds: float, now: float) -> None:
        """`rank` has `seconds` of a whole core to compute from `now` on."""
        self._advance(now)
        self._number += 1
        heapq.heappush(self._tasks, Task(self._given + seconds, self._number, rank, name, now))

    def next_end(self) -> float | None:
        """When the next task will be done, if none comes before; None without tasks."""
        return self._now + (self._tasks[0].until - self._given) / self._share if self._tasks else None

    def finish(self, now: float) -> list[Task]:
        """The tasks that are done at `now`, which is `next_end`."""
        until = self._tasks[0].until
        self._advance(now)
        self._given = until  # to the last bit
        done = []
        while self._tasks and self._tasks[0].until <= until:
            done.append(heapq.heappop(self._tasks))
        return done

    @property
    def _share(self) -> float:
        return min(1.0, self._cores / len(self._tasks))

    def _advance(self, now: float) -> None:
        if self._tasks:
            self._given += (now - self._now) * self._share
        self._now = now
