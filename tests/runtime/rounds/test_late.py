"""Units that are late: what they changed is left out, nobody waits for long, and they come back."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitc.runtime.rounds.late import LateAverages
from splitc.runtime.transport.base import CompletedWork
from splitc.runtime.transport.formats import FORMATS, Format
from splitc.runtime.transport.short import Short


class Coming:
    """A message that is expected."""

    call: Callable[[], None]

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        return


class Wire:
    """A rank's end of a line on which messages stay until they are carried."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device, self.world, self.cut = rank, torch.device("cpu"), 2, False
        self.sent, self.expected = deque[Tensor](), deque[Coming]()
        self.peer: Wire

    def broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Any:
        assert ranks == (0, 1)
        if src == self.rank:
            self.sent.append(tensor.clone())
            return CompletedWork()
        self.expected.append(Coming(tensor))
        return self.expected[-1]

    def when_complete(self, work: Coming, call: Callable[[], None]) -> bool:
        work.call = call
        return True

    def carry(self) -> None:
        """Let what was sent arrive, at both ends."""
        for here, there in ((self, self.peer), (self.peer, self)):
            while here.sent and there.expected:
                coming = there.expected.popleft()
                coming.tensor.copy_(here.sent.popleft())
                coming.call()


class Unit:
    """A rank of a unit of its own, with two parameters and a statistic."""

    def __init__(self, rank: int, form: str = "", patience: float = 0.01) -> None:
        self.wire, self.context = Wire(rank), SimpleNamespace(round=0)
        short = {"averages": Short(self.wire, form)} if form else {}  # type: ignore[arg-type]
        spec = SimpleNamespace(averaged=(0, 1), replicas=(rank,), through_server=True, unit=(rank,))
        role: Any = SimpleNamespace(spec=spec, transport=self.wire, short=short, context=self.context)
        self.averages = LateAverages(role, self.wire, patience)  # type: ignore[arg-type]
        self.parameters = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(7))]
        self.statistic = torch.zeros(3)
        self.buckets: list[list[Tensor]] = [[*self.parameters], [self.statistic]]

    def begin(self, lr: float = 1.0, momentum: float = 0.0) -> None:
        self.averages.keep(self.buckets, lr, momentum, False)
        self.averages.open(self.buckets, (0, 0))

    def train(self, change: float) -> None:
        for tensor in (*self.parameters, self.statistic):
            tensor.data += change

    def turn(self, number: int, share: float = 0.5) -> None:
        self.context.round = number
        self.averages.start(self.buckets, 0, share)

    def values(self) -> list[float]:
        return [float(tensor.detach()[0]) for tensor in (*self.parameters, self.statistic)]


def two(**options: Any) -> tuple[Unit, Unit]:
    hub, other = Unit(0, **options), Unit(1, **options)
    hub.wire.peer, other.wire.peer = other.wire, hub.wire
    return hub, other


def exchange(hub: Unit, other: Unit) -> None:
    """A turn in which everything comes in time."""
    hub.wire.carry()
    hub.averages.arrive(0)
    hub.wire.carry()
    other.averages.arrive(0)


def test_what_comes_in_time_is_a_mean_weighted_by_shares(capsys: pytest.CaptureFixture[str]) -> None:
    hub, other = two()
    for unit in (hub, other):
        unit.begin()
    for number, expected in enumerate((2.5, 5.0)):
        hub.train(1.0)
        other.train(3.0)
        hub.turn(number, 0.25)
        other.turn(number, 0.75)
        exchange(hub, other)
        assert hub.values() == other.values() == [expected] * 3
    assert not capsys.readouterr().err


def test_the_hub_alone_has_the_outer_momentum() -> None:
    hub, other = two()
    for unit in (hub, other):
        unit.begin(lr=1.0, momentum=0.5)
    for number, expected in enumerate((1.0, 2.5)):  # and half of the first step again
        hub.train(1.0)
        other.train(1.0)
        hub.turn(number)
        other.turn(number)
        exchange(hub, other)
        assert hub.values()[:2] == other.values()[:2] == [expected] * 2


def test_an_answer_leaves_before_the_turn_arrives_once_all_have_come() -> None:
    hub, other = two()
    for unit in (hub, other):
        unit.begin()
        unit.train(1.0 + unit.wire.rank)
        unit.turn(0)
    hub.wire.carry()
    hub.averages.poll()
    hub.train(8.0)  # meanwhile
    hub.wire.carry()
    other.averages.arrive(0)
    assert other.values() == [1.5] * 3 and hub.values() == [9.0] * 3
    hub.averages.arrive(0)
    assert hub.values() == [9.5] * 3  # 1.5, and what it trained meanwhile


@pytest.mark.parametrize("form", ["", "int8"])
def test_a_unit_that_was_cut_off_is_left_out_and_comes_back(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub, other = two(form=form)
    for unit in (hub, other):
        unit.begin()
    for number in range(3):  # nothing passes
        hub.train(1.0)
        other.train(5.0)
        hub.turn(number)
        other.turn(number)
        for unit in (hub, other):
            unit.averages.arrive(0)
    assert hub.values() == [3.0] * 3 and other.values() == [15.0] * 3
    assert len(other.wire.sent) == 1  # one message waits, however many turns there were
    hub.train(1.0)
    other.train(5.0)
    hub.wire.carry()
    hub.turn(3)  # the change of turn 0 has come: too late, but answered
    other.turn(3)
    hub.averages.arrive(0)
    assert hub.values() == [4.0] * 3
    hub.wire.carry()
    other.averages.arrive(0)
    near = 0.01 if form else 1e-6
    assert other.values() == [pytest.approx(3.0, rel=near)] * 2 + [3.0]  # as the hub was when it answered
    hub.train(1.0)
    other.train(1.0)
    hub.turn(4)
    other.turn(4)
    exchange(hub, other)
    assert hub.values() == [pytest.approx(5.0, rel=near)] * 2 + [5.0]
    assert other.values() == [pytest.approx(5.0, rel=near)] * 2 + [5.0]
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "round 0: ranks 1 are left out: nothing came in 0.01 s",
        "round 0: ranks 1 are left out: nothing came in 0.01 s",
        "round 3: ranks 1 are back",
        "round 4: ranks 1 are back",
    ]


def test_rounding_is_fed_back_both_ways() -> None:
    hub, other = two(form="int8")
    for unit in (hub, other):
        unit.begin()
    change = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for number in range(20):
        other.parameters[0].data += change
        hub.turn(number)
        other.turn(number)
        exchange(hub, other)
    moved = hub.parameters[0].detach() / 10  # half the change of each turn
    rounding = (change.abs().max() / 127).item()
    assert (moved - change).abs().max().item() < rounding / 5  # without feedback some are half a step wrong
    assert (hub.parameters[0] - other.parameters[0]).abs().max().item() < rounding
    form: Format = FORMATS["int8"]
    assert hub.averages._lines[0]._nbytes == 16 + form.nbytes(1007) + 12


def test_before_a_round_ends_all_that_is_under_way_is_answered() -> None:
    hub, other = two()
    for unit in (hub, other):
        unit.begin()
        unit.train(1.0)
    other.turn(0)  # the hub has not begun it
    hub.wire.carry()
    hub.averages.poll()
    hub.wire.peer.broadcast = _carrying(hub.wire, hub.wire.peer.broadcast)  # type: ignore[method-assign]
    hub.averages._answer(hub.averages._lines[0])
    hub.wire.carry()
    other.averages.hang_up()
    hub.wire.carry()
    hub.averages.hang_up()
    assert not hub.wire.expected and not other.wire.expected and not hub.wire.sent and not other.wire.sent


def _carrying(wire: Wire, call: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(*given: Any) -> Any:
        work = call(*given)
        wire.carry()
        return work

    return broadcast


SCRIPT = """
import torch, splitc
from torch import nn
model, batch = nn.Linear(6, 3), (torch.randn(8, 6), torch.randint(0, 3, (8,)))
sites = splitc.Sites(period=4, outer_lr=0.7, delay=1, ranks=1, through="server", patience=1.0)
program = splitc.compile(model, 2, *batch, nn.functional.cross_entropy, strategy=sites, cluster="v100-10gbe")
worker = program.worker(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
for _ in range(3):
    worker.step(*batch)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_leaves_a_round_open_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
