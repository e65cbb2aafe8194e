"""Model cores shared by several ranks as processor sharing, the long-run behaviour of an OS scheduler.

Each of n computing ranks gets min(1, cores / n) of a core.  The shares are equal, so a single clock measures the
service that every task has received: the virtual time of fair queueing (Parekh and Gallager 1993).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Task(NamedTuple):
    """Work of one rank.

    virtual_finish: virtual time of its completion (s).  sequence: breaks ties in the order of arrival.
    start: simulated time of its start (s).
    """

    virtual_finish: float
    sequence: int
    rank: int
    name: str
    start: float


class Cores:
    """`cores` cores, and `units` equal tasks for each that is added.  `now` (s) must be non-decreasing across calls."""

    def __init__(self, cores: float, units: int = 1) -> None:
        self._cores, self._units = cores, units
        self._tasks: list[Task] = []
        self._now = self._virtual_time = 0.0
        self._sequence = 0

    def add(self, rank: int, name: str, seconds: float, now: float) -> None:
        """Start a task of `rank` at `now` that takes `seconds` on a dedicated core."""
        self._advance(now)
        self._sequence += 1
        heapq.heappush(self._tasks, Task(self._virtual_time + seconds, self._sequence, rank, name, now))

    def next_end(self) -> float | None:
        """Return when the next task completes if none is added before; None without tasks."""
        return self._now + (self._tasks[0].virtual_finish - self._virtual_time) / self._share if self._tasks else None

    def finish(self, now: float) -> list[Task]:
        """Remove and return the tasks that complete at `now`, the time given by `next_end`."""
        until = self._tasks[0].virtual_finish
        self._advance(now)
        self._virtual_time = until  # exact: the sum above may differ by rounding
        done = []
        while self._tasks and self._tasks[0].virtual_finish <= until:
            done.append(heapq.heappop(self._tasks))
        return done

    @property
    def _share(self) -> float:
        return min(1.0, self._cores / (self._units * len(self._tasks)))

    def _advance(self, now: float) -> None:
        if self._tasks:
            self._virtual_time += (now - self._now) * self._share
        self._now = now
