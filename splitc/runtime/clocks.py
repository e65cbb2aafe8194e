"""Clocks of what computes: the host, and a GPU's stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Marks moments, in seconds by a function of the host such as `time.thread_time`.

    The seconds between two marks can be read once `settle` has returned.
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now = now

    def between(self, begun: Any, ended: Any) -> float:
        return float(ended - begun)

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return True

    def settle(self) -> None:
        """Wait until the device has come to every mark; the host does when it makes it."""


class StreamClock(Clock):
    """Seconds between events on the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(self._mark)
        self._device = device

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(begun.elapsed_time(ended)) / 1e3  # events count milliseconds

    def reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
