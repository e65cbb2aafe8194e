"""All layers on every rank, gradients all-reduced."""

from __future__ import annotations

from dataclasses import dataclass

from splitc.passes.planner.pin_checks import unreplicated
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy


@dataclass(frozen=True)
class DataParallel(Strategy):
    """All layers on every rank, gradients all-reduced."""

    name = "data_parallel"

    def impossible(self, request: Request) -> list[str]:
        return super().impossible(request) + unreplicated(request)
