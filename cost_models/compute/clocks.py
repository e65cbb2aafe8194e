"""The clock of a device, and the state of the process in which it is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from splitc.runtime.clocks import Clock, StreamClock
from splitc.runtime.heap import kept_memory


def clock_of(where: torch.device) -> Clock:
    """The clock of a device: of a CPU's single thread the time that it ran, which other processes do not change."""
    if where.type == "cuda":
        return StreamClock(where)
    return Clock(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)


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
