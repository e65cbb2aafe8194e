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
def defaults() -> Iterator[None]:
    """Compute as in a new process, whatever a model's file has set: in float32, on the CPU, with gradients."""
    before, is_on_cpu = torch.get_default_dtype(), torch.get_default_device().type == "cpu"
    torch.set_default_dtype(torch.float32)
    try:  # a default device slows every operation down
        with nullcontext() if is_on_cpu else torch.device("cpu"), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def seeded(where: torch.device) -> Iterator[None]:
    """Draw random numbers from seed 0, and keep freed memory as a rank does; afterwards both are as they were."""
    memory = kept_memory() if where.type == "cpu" else nullcontext()
    with memory, torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(0)
        yield
