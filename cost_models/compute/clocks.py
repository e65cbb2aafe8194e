"""Clocks for what a device computes, and the state of the process in which it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from splitc.runtime.heap import kept_memory


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


def clock_of(where: torch.device) -> Clock:
    """The clock of a device: of a CPU's single thread the time that it ran, which other processes do not change."""
    if where.type == "cuda":
        return StreamClock(where)
    return HostClock(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads: torchrun gives one to each of the ranks that share a host."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(where: torch.device) -> Iterator[None]:
    """Draw random numbers from seed 0, and keep freed memory as a rank does; afterwards both are as they were."""
    memory = kept_memory() if where.type == "cpu" else nullcontext()
    with memory, torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(0)
        yield
