"""Clocks of what computes: the host, and a GPU's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments; the seconds between two marks can be read once `settle` has returned."""

    def now(self) -> Any: ...

    def between(self, begun: Any, ended: Any) -> float: ...

    def settle(self) -> None:
        """Wait until the device has come to every mark."""


class HostClock:
    """Seconds by a function such as `time.thread_time`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def between(self, begun: float, ended: float) -> float:
        return ended - begun

    def settle(self) -> None:
        """The host comes to a mark when it makes it."""


class StreamClock:
    """Seconds between events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(begun.elapsed_time(ended)) / 1e3  # events count milliseconds

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
