"""Every rank trains the whole model by itself, and all average once a round."""

from __future__ import annotations

from dataclasses import dataclass

from splitc.errors import PlacementError
from splitc.passes.planner.pin_checks import PinWords, unreplicated
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Count
from splitc.strategies.in_rounds import InRounds


@dataclass(frozen=True)
class LocalSGD(InRounds):
    """Every rank trains the whole model by itself, and after each `period` updates all average (IST 4; local SGD)."""

    name = "local_sgd"
    exact = False
    compared = False
    pins = PinWords(syncs=("average", "none"))
    period: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_batchnorm or self.all_reduce:
            raise PlacementError("local_sgd: every rank trains by itself; leave sync_batchnorm and all_reduce out")

    def impossible(self, request: Request) -> list[str]:
        return super().impossible(request) + unreplicated(request)
