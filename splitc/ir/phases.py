"""What a rank does with the time of a step: predicted by the simulation, measured by a run, told in the same words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Something that a rank does from `start` to `end` (s).

    stream: "compute", "wait" or "comm".  nbytes: what travels.
    """

    rank: int
    stream: str
    name: str
    start: float
    end: float
    nbytes: float = 0.0


@dataclass(frozen=True)
class Phases:
    """One step of a rank, in seconds: it computes or waits, and transfers are under way meanwhile.

    step: the whole of it, compute and waiting.  communication: while at least one of its transfers is under way,
    hidden behind computing or not.  sent_bytes: payload.
    """

    rank: int
    step: float
    compute: float
    waiting: float
    communication: float
    sent_bytes: float
