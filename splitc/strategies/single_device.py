"""All layers on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.passes.planner.divisions import Division, Role
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy


@dataclass(frozen=True)
class SingleDevice(Strategy):
    """All layers on one rank."""

    name = "single_device"
    is_alone = True

    def divisions(self, request: Request) -> Iterable[Division]:
        return (Division((Role((0,), request.bounds(1)),)),)
