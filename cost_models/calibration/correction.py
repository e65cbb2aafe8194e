"""What a run took beside what was predicted, in two numbers; `learning.py` has those that change a cluster.

compute        sum of measured compute / sum of predicted, over ranks
communication  the same ratio, over ranks with more than 1 ms predicted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitc.runtime.transport.phases import Phases

MIN_SECONDS = 1e-3
"""Seconds of predicted communication below which its error says nothing about a link."""


@dataclass(frozen=True)
class Factors:
    """How many times as long as predicted computing and transfers took; None where that is unknown."""

    compute: float | None
    communication: float | None

    @property
    def empty(self) -> bool:
        return self.compute is None and self.communication is None


def factors_of(predicted: Sequence[Phases], measured: Sequence[Phases]) -> Factors:
    """Return measured over predicted.  Both sequences are indexed by rank."""
    pairs = list(zip(predicted, measured, strict=True))
    significant = [(p, m) for p, m in pairs if p.communication > MIN_SECONDS]
    return Factors(
        _ratio(sum(m.compute for _, m in pairs), sum(p.compute for p, _ in pairs)),
        _ratio(sum(m.communication for _, m in significant), sum(p.communication for p, _ in significant)),
    )


def _ratio(measured: float, predicted: float) -> float | None:
    return measured / predicted if measured > 0 and predicted > 0 else None
