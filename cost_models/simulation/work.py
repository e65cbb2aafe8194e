"""Progress of ranks and transfers, and what one core does at the same time: computing, and its part of transfers.

    U = sum of processor / seconds      demand of a rank's transfers in flight
    c = max(1 - U, 1/3)                 speed of its computing meanwhile
    (1 - c) / U                         speed of these transfers while it computes, at most 1

A scheduler wakes what waits for a line before what computes, so computing gets what transfers leave; beside it run the
thread that transfers and the kernel's, each as often.  Where both together take longer than one after the other, since
ranks have little of a core, calibration finds U > 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from splitc.cost_models.simulation.operations import Compute, Operation, Transfer
from splitc.runtime.transport.phases import Phases

_LEAST = 1 / 3


@dataclass(slots=True)
class Work:
    """A computation or a transfer that began at `start`; `left`: seconds of it at full speed, as of `since`.

    due: when it ends if its speed stays as it is; negative before it has one.
    """

    what: Compute | Transfer
    start: float
    left: float
    since: float
    speed: float = 1.0
    due: float = -1.0

    def pace(self, speed: float, now: float) -> bool:
        """Go on at `speed` from now on; return whether that changes when it ends."""
        if speed == self.speed and self.due >= 0:
            return False
        self.left = max(0.0, self.left - (now - self.since) * self.speed)
        self.speed, self.since, self.due = speed, now, now + self.left / speed
        return True


@dataclass
class Rank:
    """Progress of one rank, and its time by phase (s)."""

    operations: Sequence[Operation]
    next: int = 0
    laps: int = 0  # how often it has completed its operations
    owed: float = 0.0  # processor time of transfers, to be added to the next computation on shared cores
    compute: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    sent: float = 0.0
    work: Work | None = None  # what it computes
    flying: dict[Transfer, Work] = field(default_factory=dict)
    under_way: float = 0.0  # since when there are some
    pace: float = 1.0  # of transfers
    blocked: int = 0  # number of unfinished transfers that it waits for
    since: float = 0.0  # start of the current wait
    marks: list[Phases] = field(default_factory=list)  # totals at each mark; `step` is the clock


@dataclass(slots=True)
class Progress:
    """What has happened to a transfer in the current lap."""

    begun: int = 0  # parties that have begun it
    ready: tuple[float, float, int] = (0.0, 0.0, 0)  # the last of their begins: time, since, turn (`Simulation._at`)
    ended: int = 0  # in how many laps
    waiters: list[int] = field(default_factory=list)


def speeds(flying: Iterable[Transfer]) -> tuple[float, float]:
    """The speed of computing beside these transfers, and theirs."""
    demand = sum(each.processor / each.seconds for each in flying if each.processor)
    computing = max(1 - demand, _LEAST)
    return computing, min(1.0, (1 - computing) / demand) if demand else 1.0
