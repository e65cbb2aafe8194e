"""How much longer or shorter than expected the computations of a rank take.

Their times have a variance in proportion to their length (`Device.jitter`), so the sum of several varies as one that is
as long, however a plan divides its computing.  The draws of a rank follow from a seed: all plans meet the same ones,
and samples come in pairs, one of which takes longer where the other takes less.
"""

from __future__ import annotations

import math
import random


class Noise:
    """Of one rank in one sample.  jitter: variance of a computation for each second of it (s)."""

    def __init__(self, jitter: float, rank: int, sample: int) -> None:
        self._jitter, self._sign = jitter, 1 - 2 * (sample % 2)
        self._draw = random.Random(f"{rank} {sample // 2}").gauss
        self._left = 0.0  # drawn, but more than a computation can be shorter by

    def of(self, seconds: float) -> float:
        """What a computation of `seconds` takes longer this time; negative: shorter, by half of it at most."""
        if not seconds:
            return 0.0
        drawn = self._left + self._sign * math.sqrt(self._jitter * seconds) * self._draw(0.0, 1.0)
        taken = max(drawn, -seconds / 2)
        self._left = drawn - taken
        return taken
