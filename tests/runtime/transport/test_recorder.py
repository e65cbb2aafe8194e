"""The recorder: it changes nothing, misses nothing, and its phases add up."""

from __future__ import annotations

import json
import random
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.collectives.model_parallel import Group
from splitc.runtime.transport import recorder as machinery
from splitc.runtime.transport.base import CompletedWork, Transport, Work
from splitc.runtime.transport.phases import (
    TRACED,
    WARM_UP,
    Span,
    computing,
    length,
    phases,
    report,
    transfers,
    waits,
    write,
)
from splitc.runtime.transport.recorder import Operation, Recorder, Step
from tests.runtime.transport.test_distributed import launch
from tests.support.every_strategy import images, planned
from tests.support.ranks import on_ranks, part_of, worker_of
from tests.support.sampling import in_one

LATE = 0.1  # seconds that somebody comes late


@pytest.mark.slow
def test_what_is_issued_between_steps_is_passed_on_and_not_recorded() -> None:
    program = planned(2, "data_parallel", norm=True)
    batch = images(program.plan.global_batch)

    def run(transport: Transport) -> tuple[int, int]:
        recorder = Recorder(transport)
        worker = worker_of(program, recorder)
        part = part_of(worker, batch, program.plan.local_batches)
        with recorder.step():
            worker.step(*part)
        worker.evaluate(*part)
        worker.state_dict()
        with recorder.step():
            worker.step(*part)
        return len(recorder.steps[0].operations), len(recorder.steps[1].operations)

    assert all(first == second > 0 for first, second in on_ranks(2, run))


def test_a_rank_waits_for_a_late_peer_and_nothing_travels_meanwhile() -> None:
    def run(transport: Transport) -> Step:
        recorder = Recorder(transport)
        recorder.align()
        message = torch.ones(1000)
        with recorder.step():
            if recorder.rank == 0:
                recorder.irecv(message, 1).wait()
            else:
                time.sleep(LATE)
                recorder.isend(message, 0).wait()
            recorder.all_reduce(message, (0, 1)).wait()
        return recorder.steps[0]

    steps = on_ranks(2, run)
    waiting, late = phases(steps)
    assert waiting.waiting > 0.5 * LATE
    assert late.compute > 0.9 * LATE
    (arriving, _), (leaving, _) = transfers(steps)
    assert leaving.end <= arriving.end
    assert leaving.start == arriving.start == steps[1].operations[0].issued > steps[0].operations[0].issued + 0.5 * LATE
    assert (arriving.name, leaving.name) == ("receive from rank 1", "send to rank 0")
    assert arriving.nbytes == 4000 and [each.sent_bytes for each in (waiting, late)] == [4000, 8000]


def test_waits_inside_of_backward_are_recorded() -> None:
    def run(transport: Transport) -> Step:
        recorder = Recorder(transport)
        x = torch.ones(8, requires_grad=True)
        with recorder.step():
            entered = Transition(State.REPLICATE, State.DIVIDED)
            y = Group(recorder, (0, 1)).transition(x, entered, Extents()).sum()
            if recorder.rank == 1:
                time.sleep(LATE)
            y.backward()
        assert x.grad is not None and x.grad.tolist() == [2.0] * 8
        return recorder.steps[0]

    steps = on_ranks(2, run)
    assert [op.kind for op in steps[0].operations] == ["all_reduce"]
    assert phases(steps)[0].waiting > 0.5 * LATE


class Slowly(Transport):
    """A rank of two whose messages take their time; `given` knows which works are still held."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.rank, self.world, self.device = 0, 2, torch.device("cpu")
        self.seconds = seconds
        self.given: list[weakref.ref[Any]] = []

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        class Sleep:
            held = tensor

            def wait(self, seconds: float = self.seconds) -> None:
                time.sleep(seconds)

        work = Sleep()
        self.given.append(weakref.ref(work))
        return work

    def _nothing(*_: Any, **__: Any) -> Any:
        return CompletedWork()

    _irecv = _all_reduce = _broadcast = _all_gather = _reduce_scatter = _connect = _nothing
    broadcast_object = gather_objects = barrier = close = _nothing


def test_threads_may_issue_and_wait_at_once_and_their_waits_count_once() -> None:
    recorder = Recorder(Slowly(LATE))

    def issue() -> None:
        for _ in range(2):
            recorder.isend(torch.ones(1), 1).wait()

    threads = [threading.Thread(target=issue) for _ in range(8)]
    with recorder.step():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (step,) = recorder.steps
    assert len(step.operations) == 16 and step.sent_bytes == 16 * 4
    waiting = length(waits(0, step))
    assert 1.9 * LATE < waiting <= step.end - step.begin
    assert sum(b - a for op in step.operations for a, b in op.waits) > 15 * LATE


def test_clocks_of_one_host_begin_together_and_those_of_another_when_the_barrier_lets_them_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def origins() -> tuple[float, float]:
        def run(transport: Transport) -> float:
            recorder = Recorder(transport)
            recorder.align()
            return recorder._zero

        first, second = on_ranks(2, run)
        return first, second

    first, second = origins()
    assert first == second
    monkeypatch.setattr(machinery, "machine", lambda: threading.current_thread().name)
    first, second = origins()
    assert first != second and abs(first - second) < 5.0


@pytest.mark.slow
def test_where_the_stream_is_held_events_stand_on_both_sides_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that comes to an event every 10 ms, long after the program has asked for it."""
    clock = iter(range(100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.milliseconds = 10.0 * next(clock)

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return other.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.1))
    monkeypatch.setattr(Slowly, "waits_hold_the_stream", True)
    recorder = Recorder(Slowly())
    recorder.device = torch.device("cuda", 0)
    with recorder.step():
        first, second = recorder.isend(torch.ones(1), 1), recorder.isend(torch.ones(1), 1)
        first.wait()
        second.wait()
    (step,) = recorder.steps
    one, two = step.operations
    assert two.issued - one.issued == pytest.approx(0.01)
    assert [b - a for op in (one, two) for a, b in op.waits] == pytest.approx([0.01, 0.01])
    assert one.completed - one.issued == pytest.approx(0.03)  # events 1 and 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_what_holds_up_a_stream_is_waiting_though_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    side = torch.cuda.Stream()
    monkeypatch.setattr(Slowly, "waits_hold_the_stream", True)

    class Held(Slowly):
        def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
            with torch.cuda.stream(side):
                torch.cuda._sleep(400_000_000)  # cycles, about 0.2 s

            class OfStream:
                def wait(self) -> None:
                    torch.cuda.current_stream().wait_stream(side)

            return OfStream()

    transport = Held()
    transport.device = torch.device("cuda", torch.cuda.current_device())
    recorder = Recorder(transport)
    for _ in range(2):
        with recorder.step():
            recorder.isend(torch.ones(1, device=transport.device), 1).wait()
    each = phases([recorder.steps[1], Step(0.0, 1.0, (message(1.0, 0, receive=True),))])[0]
    assert each.waiting > 0.05
    assert each.compute < each.waiting


# -- phases of steps made by hand --------------------------------------------------------------------------------------


def message(issued: float, peer: int, receive: bool = False, wait: tuple[float, float] | None = None) -> Operation:
    routes = ((peer, 0, 10),)
    waits = () if wait is None else (wait,)
    end = 10.0 if wait is None else wait[1]
    return Operation(
        "message", issued, end, 0 if receive else 10, (), () if receive else routes, routes if receive else (), waits
    )


def test_a_message_is_under_way_from_when_both_are_ready_until_its_receiver_has_it() -> None:
    sender = Step(0.0, 10.0, (message(1.0, 1, wait=(9.0, 9.5)), message(2.0, 1, wait=(9.5, 9.6))))
    receiver = Step(0.0, 10.0, (message(3.0, 0, True, (3.0, 4.0)), message(0.5, 0, True, (5.0, 6.0))))
    for spans in transfers([sender, receiver]):
        assert sorted((span.start, span.end) for span in spans) == [(2.0, 6.0), (3.0, 4.0)]
    first, second = phases([sender, receiver])
    assert (first.waiting, first.compute, first.communication) == pytest.approx((0.6, 9.4, 4.0))
    assert (second.waiting, second.compute, second.communication) == pytest.approx((2.0, 8.0, 4.0))


def test_a_collective_begins_with_the_last_of_its_ranks_and_ends_for_each_when_it_sees_it() -> None:
    def step(issued: float, completed: float) -> Step:
        return Step(0.0, 10.0, (Operation("all_reduce", issued, completed, 8, (0, 1), waits=((7.0, 7.5),)),))

    (hidden,), (seen,) = transfers([step(1.0, 3.0), step(2.0, 7.5)])
    assert (hidden.start, hidden.end) == (2.0, 3.0)
    assert (seen.start, seen.end) == (2.0, 7.5)
    assert hidden.name == "all_reduce of ranks 0 1"


@in_one
@pytest.mark.parametrize("seed", range(0, 20, 4))
def test_computing_and_waiting_tile_a_step_whatever_it_issued(seed: int) -> None:
    draw = random.Random(seed)

    def operation() -> Operation:
        issued = draw.uniform(0, 8)
        begin = draw.uniform(issued, 9)
        return Operation("all_reduce", issued, 10.0, 1, (0,), waits=((begin, draw.uniform(begin, 10)),))

    step = Step(0.0, 10.0, tuple(operation() for _ in range(draw.randrange(6))))
    waiting, compute = waits(0, step), computing(0, step)
    assert length(waiting) + length(compute) == pytest.approx(10.0)
    assert length([*waiting, *compute]) == pytest.approx(10.0)
    (each,) = phases([step])
    assert (each.compute, each.waiting) == pytest.approx((length(compute), length(waiting)))


# -- the file ----------------------------------------------------------------------------------------------------------


def steps_of(number: int, seconds: float) -> list[Step]:
    """A new one begins every 10 s."""
    return [Step(10.0 * k, 10.0 * k + seconds, ()) for k in range(number)]


def test_the_file_leaves_out_the_warm_up_and_keeps_the_spans_of_the_last_steps(tmp_path: Path) -> None:
    number = WARM_UP + TRACED + 2
    whole = report([steps_of(number, 8.0), steps_of(number, 9.0)], [4] * number, {"device": "cpu"})
    path = tmp_path / "measured.json"
    write(whole, path)
    assert [each.name for each in tmp_path.iterdir()] == ["measured.json"]
    data = json.loads(path.read_text())
    assert (data["schema"], data["world"], data["warm_up"], data["device"]) == (1, 2, WARM_UP, "cpu")
    assert [[each["step"] for each in step["phases"]] for step in data["steps"]] == [[8.0, 9.0]] * (TRACED + 2)
    assert [each["between"] for each in data["steps"][0]["phases"]] == [2.0, 1.0]
    spans = [Span(**span) for span in data["spans"]]
    assert [span.start for span in spans if span.rank == 0] == [10.0 * k for k in range(number - TRACED, number)]


# -- real processes ----------------------------------------------------------------------------------------------------


def hidden_all_reduce() -> Sequence[Step]:
    """An all-reduce that ends long before anybody waits for it, and a message likewise."""
    from splitc.runtime.transport.distributed import init

    recorder = Recorder(init())
    recorder.align()
    total, other = torch.ones(1000), torch.ones(1000)
    with recorder.step():
        first = recorder.all_reduce(total, (0, 1))
        second = recorder.isend(other, 1) if recorder.rank == 0 else recorder.irecv(other, 0)
        time.sleep(1.0)
        first.wait()
        second.wait()
    assert total.tolist() == [2.0] * 1000
    recorder.close()
    return recorder.steps


@pytest.mark.slow
@pytest.mark.processes
def test_gloo_tells_when_a_collective_is_complete_also_if_nobody_waits_yet() -> None:
    ended = launch(2, hidden_all_reduce)
    for steps in ended.values():
        collective, message = steps[0].operations
        assert collective.completed - collective.issued < 0.8
        assert message.completed - message.issued > 0.9  # of messages it does not
    first, second = (steps[0].begin for _, steps in sorted(ended.items()))
    assert abs(first - second) < 0.9  # one clock
