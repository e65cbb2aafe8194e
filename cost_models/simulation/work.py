"""What one core does at the same time: it computes, and takes part in transfers that cost processor time.

    U = sum of processor / seconds      demand of a rank's transfers in flight
    c = max(1 - U, 1/3)                 speed of its computing meanwhile
    (1 - c) / U                         speed of these transfers while it computes, at most 1

A scheduler wakes what waits for a line before what computes, so computing gets what transfers leave; beside it run the
thread that transfers and the kernel's, each as often.  Where both together take longer than one after the other, since
ranks have little of a core, calibration finds U > 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.cost_models.simulation.operations import Compute, Transfer

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


def speeds(flying: Iterable[Transfer]) -> tuple[float, float]:
    """The speed of computing beside these transfers, and theirs."""
    demand = sum(each.processor / each.seconds for each in flying if each.processor)
    computing = max(1 - demand, _LEAST)
    return computing, min(1.0, (1 - computing) / demand) if demand else 1.0
