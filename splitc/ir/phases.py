"""How a rank spends a step: predicted by the simulation, or measured by a run."""

from __future__ import annotations

from dataclasses import dataclass


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
