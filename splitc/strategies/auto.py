"""The fastest of the exact strategies."""

from __future__ import annotations

from dataclasses import dataclass

from splitc.passes.planner.strategy import Strategy


@dataclass(frozen=True)
class Auto(Strategy):
    """The fastest exact plan that fits."""

    name = "auto"
    compared = False
    compares = True
