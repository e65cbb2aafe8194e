"""What training says of its own speed, with a clock and a store that a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from splitc.runtime import live
from splitc.runtime.clocks import Clock
from splitc.runtime.live import Cause, Expected, Live, Posted, Waits, cause_of, in_words


class Store:
    """The store of a process group, in this process."""

    def __init__(self) -> None:
        self.values = dict[str, str]()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[str]:
        return [self.values[key] for key in keys]


class Ranks:
    """Two ranks in lockstep, and what rank 0 says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.said, self.steps, store = 100.0, list[tuple[int, str]](), 0, Store()
        monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: self.clock))
        self.transports = [SimpleNamespace(rank=rank, world=2, waits=Waits(), store=store) for rank in range(2)]
        self.live = [Live(each, lambda line: self.said.append((self.steps, line))) for each in self.transports]

    def train(
        self, steps: int, compute: Sequence[float] = (0.1, 0.1), transfer: float = 0.1, times: float = 1.0
    ) -> None:
        """Compute, then sum over both; the clock is of both."""
        for _ in range(steps):
            self.steps += 1
            begun, last = self.clock, max(compute)
            for rank, transport in enumerate(self.transports):
                self.clock = begun
                self.live[rank].begin()
                self.clock = begun + times * (last + transfer)
                issued = begun + times * compute[rank]
                transport.waits.add((0, 1), issued, issued)
                self.live[rank].after()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_after_20_steps_there_is_a_line_and_another_one_only_when_steps_change(ranks: Ranks) -> None:
    ranks.live[0].expected = Expected(0.19)
    for k in range(100):
        ranks.train(1, times=1.0 + 0.01 * (k % 3))
    assert [line for _, line in ranks.said] == ["step 202 ms, predicted 190 ms (+6 %)"]
    assert 20 <= ranks.said[0][0] <= 22
    ranks.train(30, transfer=0.12)
    assert [line for _, line in ranks.said[1:]] == ["step 220 ms, predicted 190 ms (+16 %)"]


def test_what_is_waited_for_between_steps_is_of_none(ranks: Ranks) -> None:
    ranks.live[0].expected = Expected(0.2, (0.1, 0.1))
    for k in range(60):
        ranks.train(1)
        for transport in ranks.transports:  # a checkpoint, of some seconds
            transport.waits.add((0, 1), ranks.clock, ranks.clock)
            ranks.clock += 3.0 * (k > 30)
            transport.waits.add((0, 1), ranks.clock - 3.0, ranks.clock - 3.0)
    assert [line for _, line in ranks.said] == ["step 200 ms, predicted 200 ms (+0 %)"]


class Stream(Clock):
    """A GPU's stream in the time of a test: a mark is the moment at which the device will come to it."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(lambda: max(ranks.clock, self.free))
        self.free, self._ranks = 0.0, ranks

    def reached(self, mark: float) -> bool:
        return mark <= self._ranks.clock

    def compute(self, seconds: float) -> None:
        self.free = self.now() + seconds


@pytest.mark.parametrize("between", [0.0, 0.05, 3.0])
def test_a_step_of_a_gpu_is_as_long_as_its_stream_computes_whatever_the_host_does_between(
    ranks: Ranks, between: float
) -> None:
    stream, told = Stream(ranks), list[str]()
    ranks.transports[0].world = 1
    gpu = Live(ranks.transports[0], told.append, stream)
    gpu.expected = Expected(0.2, (0.2,))
    for k in range(60):
        gpu.begin()
        stream.compute(0.2)
        ranks.clock += 0.001  # to issue it; the host then runs ahead, by two steps at most
        gpu.after()
        ranks.clock = max(ranks.clock + between * (k % 3 == 0), stream.free - 0.4)
    assert told == ["step 200 ms, predicted 200 ms (+0 %)"]


def test_a_network_at_half_is_reported_within_30_steps_with_the_plan_that_would_be_faster(ranks: Ranks) -> None:
    causes, told = list[Cause](), threading.Event()

    def advise(cause: Cause) -> str:
        causes.append(cause)
        told.set()
        return "another plan"

    ranks.live[0].expected = Expected(0.2, advise=advise)
    ranks.train(33)
    ranks.train(30, transfer=0.2)
    assert told.wait(10)
    assert (causes[0].ends, causes[0].computing) == ((0, 1), {}) and causes[0].transfers == pytest.approx(2.0, rel=0.01)
    lines = {line: step for step, line in ranks.said}
    assert lines["step 300 ms, 200 ms before: transfers among ranks 0 1 run at 50 %"] <= 33 + 30
    time.sleep(0.05)
    assert ranks.said[-1][1] == "another plan"
    ranks.train(40, transfer=0.2)
    assert len(causes) == 1, "it is said once"


def test_a_network_that_computing_hides_for_the_most_part_is_reported_too(ranks: Ranks) -> None:
    """A step of 340 ms takes 400; what ranks wait in it grows from 100 to 160 ms."""
    ranks.train(33, compute=(0.24, 0.24), transfer=0.1)
    ranks.train(30, compute=(0.24, 0.24), transfer=0.16)
    assert [step <= 33 + 30 for step, line in ranks.said if "400 ms, 340 ms before: transfers among ranks 0 1" in line]


def test_a_rank_that_computes_slower_is_named(ranks: Ranks) -> None:
    ranks.live[0].expected = Expected(0.1, (0.05, 0.05))
    ranks.train(30)
    assert "(+100 %): rank 0 computes 100 ms in place of 50 ms and waits 100 ms in place of 50 ms" in ranks.said[0][1]
    ranks.train(30, compute=(0.1, 0.2))
    assert any("rank 1 computes 2.0x slower" in line for _, line in ranks.said)
    ranks.train(30)
    assert any("rank 1 computes 2.0x faster" in line for _, line in ranks.said), "it is told when it is over, too"


def posted(step: float, by: Mapping[str, float], compute: float = 0.1, host: str = "a") -> Posted:
    return Posted(20, step, compute, by, host)


def test_the_link_that_all_slow_messages_and_no_others_have_in_common_is_named() -> None:
    was = [posted(0.3, {"0 1": 0.1, "0 2": 0.1}), posted(0.3, {"0 1": 0.1, "1 2": 0.1}), posted(0.3, {"1 2": 0.1})]
    now = [
        posted(0.5, {"0 1": 0.1, "0 2": 0.16}),
        posted(0.5, {"0 1": 0.1, "1 2": 0.17}, host="b"),
        posted(0.5, {"1 2": 0.18}),
    ]
    cause = cause_of(was, now)
    assert cause.ends == (2,) and cause.transfers == pytest.approx(1.65)
    assert in_words(cause, ["a", "b", "node2"]) == "the link of rank 2 (node2) runs at 61 %"
    assert in_words(Cause({3: 2.0}), ["a"] * 4) == "rank 3 computes 2.0x slower"
    assert in_words(Cause({}), ["a"]) == "neither computing nor transfers alone explain it"


def test_the_steps_of_a_training_are_recorded_once_and_not_those_of_a_short_one(ranks: Ranks) -> None:
    noted = list[float]()
    ranks.live[0].expected = Expected(note=noted.append)
    ranks.train(15)
    ranks.live[0].close()
    assert noted == []
    ranks.train(60)
    ranks.live[0].close()
    assert noted == [pytest.approx(0.2)]
