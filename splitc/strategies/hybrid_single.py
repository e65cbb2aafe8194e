"""Convolutions on every rank, the fc layers on one of them (Practical Lessons 2.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitc.passes.planner.divisions import Division, Role
from splitc.passes.planner.pin_checks import PinWords
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.layer_separation import unseparated


@dataclass(frozen=True)
class HybridSingle(Strategy):
    """Convolutions on every rank, the fc layers on one of them (Practical Lessons 2.2)."""

    name = "hybrid_single"
    pins = PinWords(stages=2)

    def divisions(self, request: Request) -> Iterable[Division]:
        bounds = request.bounds(request.world)
        return (Division((Role(tuple(range(request.world)), bounds), Role((0,), (0, bounds[-1])))),)

    def impossible(self, request: Request) -> list[str]:
        return super().impossible(request) + unseparated(request)
