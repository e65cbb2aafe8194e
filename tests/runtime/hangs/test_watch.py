"""Ranks that ask each other why one waits: threads on one store, whose programs wait where a test lets them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitc.runtime.errors import RESTART
from splitc.runtime.hangs.watch import Watch
from splitc.runtime.live import Waits

FLOOR = 0.1  # seconds
LONG = 60.0  # seconds that a test waits for what must come


class Store:
    """The store of a process group, in this process; `stuck` lets every request wait."""

    def __init__(self) -> None:
        self.values, self.lock, self.stuck = dict[str, str](), threading.Lock(), threading.Event()

    def add(self, key: str, number: int) -> int:
        with self._turn():
            self.values[key] = str(int(self.values.get(key, "0")) + number)
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        with self._turn():
            self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        with self._turn():
            return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        with self._turn():
            return self.values[key].encode()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        while self.stuck.is_set():
            time.sleep(0.01)
        with self.lock:
            yield


class Training:
    _steps, _program, rank = 40, None, SimpleNamespace(evaluated=0)
    live: Any = None


class Ranks:
    """Ranks of a training in step 41, what they print, and which of them have ended."""

    def __init__(self, world: int) -> None:
        self.store, self.said, self.ended = Store(), list[str](), dict[int, None]()  # in their order
        self.waits = [Waits() for _ in range(world)]
        self.trainings = [Training() for _ in range(world)]
        self.watches, self.world, self.over = list[Watch](), world, threading.Event()

    def watch(self, rank: int, patience: float = LONG) -> None:
        def end() -> None:
            self.ended[rank] = None
            watch.close()

        waits = self.waits[rank]
        transport = SimpleNamespace(rank=rank, world=self.world, waits=waits, is_blocked=lambda: bool(waits.now[0]))
        watch = Watch(transport, self.store, FLOOR, "node1", self.said.append, end, patience)
        self.watches.append(watch)
        watch.follow(self.trainings[rank])

    def wait(self, rank: int, what: str, *ends: int) -> None:
        self.waits[rank].now = what, ends, time.monotonic()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert condition()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.over.set()
    made.store.stuck.clear()
    for watch in made.watches:
        watch.close()


def endless_dataset(ranks: Ranks, rank: int) -> None:
    ranks.watch(rank)  # of the thread that trains
    while not ranks.over.is_set():
        time.sleep(0.01)


def test_a_rank_in_an_endless_dataset_is_named_with_its_line_once_and_all_ranks_end(ranks: Ranks) -> None:
    threading.Thread(target=endless_dataset, args=(ranks, 2), daemon=True).start()
    ranks.until(lambda: len(ranks.watches) == 1)
    for rank in (0, 1):
        ranks.watch(rank)
        ranks.wait(rank, "all_reduce (3,) float32", 0, 1, 2)
    ranks.until(lambda: ranks.ended.keys() == {0, 1, 2})
    (text,) = ranks.said
    assert "training hangs: rank 2 has been in your code, after step 40" in text
    assert "(test_watch.py, line " in text and ", in endless_dataset)" in text.partition("\n")[0]
    assert "  ranks 0 and 1, after step 40: waits in all_reduce (3,) float32, for " in text
    assert text.endswith("a wait may take 0.1 s, more in slow steps: SPLITC_TIMEOUT sets it")


def test_a_rank_that_left_out_a_step_is_named(ranks: Ranks) -> None:
    ranks.trainings[1]._steps = 39
    for rank in range(3):
        ranks.watch(rank)
        ranks.wait(rank, "barrier" if rank == 1 else "all_reduce (3,) float32", 0, 1, 2)
    ranks.until(lambda: ranks.ended.keys() == {0, 1, 2})
    assert len(ranks.said) == 1
    assert ranks.said[0].startswith("training hangs: rank 1 is after step 39, after 0 evaluations (test_watch.py, ")
    assert "ranks 0 and 2 are after step 40" in ranks.said[0].partition("\n")[0]


def test_a_rank_that_gives_no_answer_is_named(ranks: Ranks) -> None:
    ranks.store.set("2", '["node2", 1, ""]')
    ranks.watch(0, patience=FLOOR)
    ranks.wait(0, "irecv (3,) float32 from rank 2, tag 0", 2, 0)
    ranks.until(lambda: ranks.ended.keys() == {0})
    first = ranks.said[0].partition("\n")[0]
    assert first.startswith(
        "training hangs: no word from rank 2 (node2): it is stopped, its line is cut, or its host is gone; rank 0 waits"
    )


def test_who_asks_ends_before_the_others_so_that_it_lives_to_kill_who_gives_no_answer(ranks: Ranks) -> None:
    ranks.store.set("2", '["node2", 1, ""]')
    for rank in (1, 0):
        ranks.watch(rank, patience=FLOOR)
    ranks.wait(0, "irecv (3,) float32 from rank 2, tag 0", 2, 0)
    ranks.until(lambda: ranks.ended.keys() == {0, 1})
    assert [*ranks.ended] == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_of_this_host_that_is_stopped_is_named_and_ended(ranks: Ranks) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        born = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        ranks.store.set("1", json.dumps(["node1", process.pid, "another process"]))
        ranks.store.set("2", json.dumps(["node1", process.pid, born]))
        ranks.watch(0, patience=FLOOR)
        ranks.wait(0, "irecv (3,) float32 from rank 2, tag 0", 2, 0)
        ranks.watches[0]._kill(1)
        assert process.poll() is None  # its number is that of a process which began at another time
        ranks.until(lambda: ranks.ended.keys() == {0})
        assert process.wait(LONG) == -signal.SIGKILL
    assert "rank 2: it is stopped (SIGSTOP)" in ranks.said[0]


def test_a_rank_whose_line_is_cut_ends_alone_and_one_that_waits_for_nobody_does_not(ranks: Ranks) -> None:
    ranks.watch(0, patience=FLOOR)
    ranks.watch(1, patience=FLOOR)
    ranks.store.stuck.set()
    ranks.wait(0, "irecv (3,) float32 from rank 2, tag 0", 2, 0)
    ranks.until(lambda: ranks.ended.keys() == {0})
    assert len(ranks.said) == 1
    assert ranks.said[0].startswith("stopped: rank 0 waits, and has had no word from ")


def test_what_a_rank_has_waited_once_it_may_wait_five_times_and_a_predicted_step_too(ranks: Ranks) -> None:
    ranks.watch(0)
    watch = ranks.watches[0]
    ranks.wait(0, "barrier", 0, 1, 2)
    ranks.until(lambda: watch._seen[0] == "barrier" and watch._waited > 0.0)
    ranks.wait(0, "", *())
    ranks.until(lambda: watch._longest > 0.0)
    watch._longest = 50.0
    assert watch._allowed == pytest.approx(250.0)
    ranks.trainings[0].live = SimpleNamespace(expected=SimpleNamespace(seconds=80.0))
    ranks.trainings[0]._steps = 1
    assert watch._allowed == pytest.approx(3 * 5 * 80.0)


def test_a_rank_that_is_aborted_says_what_all_do_and_ends_them(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.watch(rank)
    ranks.trainings[1]._steps = 41
    threading.Thread(target=ranks.watches[1]._aborted, args=(signal.SIGABRT,), daemon=True).start()
    ranks.until(lambda: ranks.ended.keys() == {0, 1, 2})
    (text,) = ranks.said
    assert text.startswith("stopped: rank 1 aborts, as told above: rank 1 is after step 41, after 0 evaluations (")
    others = re.findall(r"^  ranks? (.*), after step 40: waits for no other rank, for \d+ s$", text, re.M)
    assert " and ".join(others) == "0 and 2"  # one block, unless their stacks differ


ABORTS = """
import ctypes, threading, time
from types import SimpleNamespace
from splitc.runtime.hangs.watch import Watch
from splitc.runtime.live import Waits
from tests.runtime.hangs.test_watch import Store

transport = SimpleNamespace(rank=0, world=1, waits=Waits(), is_blocked=lambda: False)
watch = Watch(transport, Store(), 1.0, "node1")
threading.Thread(target=ctypes.CDLL(None).abort).start()  # as a library does, in a thread of its own
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("forked")
def test_what_ranks_do_is_said_before_a_library_aborts_one() -> None:
    done = subprocess.run([sys.executable, "-c", ABORTS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith("stopped: rank 0 aborts, as told above after step 0\n  rank 0, after step 0: ")
    assert done.returncode == RESTART
