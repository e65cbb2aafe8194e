"""Ranks stop after the same step, whatever step each of them is in when one gets a signal."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from splitc.runtime.errors import RESTART
from splitc.runtime.launch import stopping as module
from splitc.runtime.launch.stopping import Stopped, Stopping
from tests.support.sampling import sampled


@dataclass
class Joined:
    """A rank of the store that all share."""

    rank: int
    world: int
    store: Any


def stores(world: int) -> list[Joined]:
    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return [Joined(rank, world, store) for rank in range(world)]


class Ranks:
    """Threads that make steps; `before_step` may wait, `made` are those of each rank."""

    def __init__(
        self, world: int, steps: int, before_step: Callable[[int, int], None], cycle: Callable[[int], tuple[int, int]]
    ) -> None:
        self.made, self.names = [0] * world, [""] * world
        self.stoppings: dict[int, Stopping] = {}
        self._steps, self._before, self._cycle = steps, before_step, cycle
        self.threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in stores(world)]
        for thread in self.threads:
            thread.start()

    def _run(self, joined: Joined) -> None:
        stopping = self.stoppings[joined.rank] = Stopping(joined)
        try:
            for step in range(1, self._steps + 1):
                stopping.before(step, self._cycle(step))
                self._before(joined.rank, step)
                self.made[joined.rank] = step
        except Stopped as stopped:
            self.names[joined.rank] = str(stopped)
        finally:
            stopping.close()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


@sampled("seed", range(3), one_in=3)
def test_no_rank_makes_a_step_more_than_another_however_far_apart_they_are(seed: int) -> None:
    """Nothing holds the ranks together: each sleeps as long as it likes, so they are many steps apart."""
    generators = [random.Random(f"{seed} {rank}") for rank in range(4)]
    ranks = Ranks(
        4, 10**6, lambda rank, step: time.sleep(generators[rank].random() * 2e-3 * (rank + 1)), lambda s: (1, 0)
    )
    while min(ranks.made) < 5:
        time.sleep(1e-3)
    for rank in (seed, 3):  # two at once
        ranks.stoppings[rank].ask("SIGTERM")
    ahead = max(ranks.made)
    ranks.join()
    assert len(set(ranks.made)) == 1
    assert ranks.made[0] >= ahead
    assert ranks.names == ["SIGTERM"] * 4


@pytest.mark.parametrize(("cycle", "begin"), [(4, 0), (6, 5)])
def test_they_stop_where_an_update_or_a_round_ends(cycle: int, begin: int) -> None:
    """begin: the steps before the present run of cycles, as after a checkpoint that ended a round early."""
    inside, go = threading.Event(), threading.Event()

    def before(rank: int, step: int) -> None:
        time.sleep(1e-3)
        if step == 7 and rank == 1:
            inside.set()
            go.wait(10)

    ranks = Ranks(2, 10**6, before, lambda step: (cycle, (step - 1 - begin) % cycle))
    assert inside.wait(10)
    ranks.stoppings[1].ask("SIGUSR1")
    go.set()
    ranks.join()
    assert len(set(ranks.made)) == 1
    assert (ranks.made[0] - begin) % cycle == 0
    assert ranks.made[0] >= 7


def test_a_rank_that_has_made_all_steps_holds_up_nobody() -> None:
    last = threading.Event()

    def before(rank: int, step: int) -> None:
        if rank == 1 and step == 3:
            last.wait(10)

    ranks = Ranks(2, 3, before, lambda step: (1, 0))
    ranks.threads[0].join(10)
    while ranks.made[1] < 2:
        time.sleep(1e-3)
    begun = time.monotonic()
    ranks.stoppings[1].ask("SIGTERM")
    last.set()
    ranks.join()
    assert ranks.made == [3, 3]
    assert time.monotonic() - begun < 5


def test_a_signal_that_ends_ranks_of_which_one_is_gone_ends_them_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    ended = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        ended.set()
        threading.Event().wait()

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(module, "_WITHIN", 0.2)
    first, _ = stores(2)
    Stopping(first).ask("SIGTERM")
    assert ended.wait(10)
    assert left == [RESTART]


class Deaf:
    """The store of a host that is gone: nothing comes back, and no error."""

    rank, world = 0, 2

    @property
    def store(self) -> Deaf:
        return self

    def clone(self) -> Deaf:
        return self

    def multi_set(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None:
        threading.Event().wait()


def test_a_signal_ends_a_rank_that_hears_nothing_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(module, "_WITHIN", 0.05)
    stopping = Stopping(Deaf())
    stopping._heard("SIGTERM")
    assert left == [RESTART]
    stopping._is_over = True
    stopping._heard("SIGTERM")
    assert left == [RESTART]


LISTENS = """
import os, sys, time
import torch.distributed as dist
from splitc.runtime.launch.stopping import Stopped, Stopping
from tests.support.sampling import sampled

class Alone:
    rank, world = 0, 1
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

stopping = Stopping(Alone())
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(30)                     # as a worker of a DataLoader
    os._exit(0)
if sys.argv[1] == "blocked":
    import ctypes
    ctypes.CDLL(None).pause()          # returns at the first signal, as an operation that waits does not
    while True:
        ctypes.CDLL(None).pause()
try:
    for step in range(1, 10**6):
        stopping.before(step)
        time.sleep(0.01)
except Stopped as stopped:
    print(stopped, flush=True)
stopping.close()
"""


def listening(how: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", LISTENS, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_takes_signals_and_its_children_leave_them_to_it() -> None:
    process, child = listening("steps")
    os.kill(child, signal.SIGUSR1)
    time.sleep(0.2)
    assert process.poll() is None
    with process:
        process.send_signal(signal.SIGUSR1)
        assert process.stdout is not None
        assert process.stdout.readline() == "SIGUSR1\n"
        os.kill(child, signal.SIGTERM)  # as a DataLoader ends it
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_ctrl_c_ends_a_process_that_waits_at_once() -> None:
    process, child = listening("blocked")
    with process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    os.kill(child, signal.SIGKILL)
