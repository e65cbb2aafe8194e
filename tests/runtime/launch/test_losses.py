"""launch.py prints every loss, and waits for no GPU to do so but where it evaluates and at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from splitc.runtime.launch.feed import evaluated
from splitc.runtime.launch.shown import Losses, Shown
from tests.support.launched import program


class OnGpu:
    """The loss of a step on a GPU: it can be copied, and its copy read after the event behind it; not itself."""

    device = torch.device("cuda", 0)

    def __init__(self, step: int, log: list[str]) -> None:
        self.step, self.log = step, log

    def detach(self) -> OnGpu:
        return self

    def to(self, device: str, non_blocking: bool) -> SimpleNamespace:
        assert device == "cpu" and non_blocking
        self.log.append(f"copy {self.step}")

        def item() -> float:
            self.log.append(f"read {self.step}")
            return self.step / 2

        return SimpleNamespace(item=item)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to losses on a GPU."""
    found: list[str] = []

    def record_event() -> SimpleNamespace:
        copied = found[-1]
        return SimpleNamespace(synchronize=lambda: found.append(f"wait for {copied}"))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=record_event))
    return found


class Five(list[Any]):
    """Batches of no dataset."""

    epoch = ""


def known(losses: Losses, step: int, loss: Any, **how: bool) -> list[tuple[int, float]]:
    return list(losses(step, loss, **how))


def test_a_loss_on_a_gpu_is_given_when_the_next_step_is_issued(log: list[str]) -> None:
    losses = Losses(SimpleNamespace(rank=SimpleNamespace(index=0)))  # type: ignore[arg-type]
    assert known(losses, 1, OnGpu(1, log)) == []
    assert known(losses, 2, OnGpu(2, log)) == [(1, 0.5)]
    assert log == ["copy 1", "copy 2", "wait for copy 1", "read 1"]
    assert known(losses, 3, OnGpu(3, log), now=True) == [(2, 1.0), (3, 1.5)]
    others = Losses(SimpleNamespace(rank=SimpleNamespace(index=1)))  # type: ignore[arg-type]
    assert known(others, 1, OnGpu(1, log), now=True) == []
    assert log[4:] == ["copy 3", "wait for copy 2", "read 2", "wait for copy 3", "read 3"]


def test_a_loss_on_the_cpu_is_given_at_once() -> None:
    losses = Losses(SimpleNamespace(rank=SimpleNamespace(index=0)))  # type: ignore[arg-type]
    assert [known(losses, k, torch.tensor(k / 2)) for k in (1, 2)] == [[(1, 0.5)], [(2, 1.0)]]


def test_launch_reads_no_loss_of_the_step_that_runs(log: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Between the losses that evaluation and the end ask for, and with TensorBoard."""
    written: list[tuple[str, float, int]] = []
    launch: Any = ModuleType("launch")
    launch.__file__ = "launch.py"
    exec(compile(program("data_parallel").files["launch.py"], "launch.py", "exec"), launch.__dict__)

    def step(number: int) -> OnGpu:
        log.append(f"step {number}")
        return OnGpu(number, log)

    worker = SimpleNamespace(rank=SimpleNamespace(index=0), steps=0, scheduler=lambda make: SimpleNamespace(step=int))
    worker.step, worker.evaluate, worker.batch_offsets = step, lambda loader: torch.tensor(7.0), (0, 4)

    @contextmanager
    def open_worker(*_: Any) -> Iterator[Any]:
        yield worker

    launch.launch = SimpleNamespace(
        open_worker=open_worker,
        batches=lambda *_: Five((k,) for k in range(1, 6)),
        evaluation=lambda *_: "data",
        board=lambda *_: SimpleNamespace(add_scalar=lambda *each: written.append(each)),
        losses=Losses,
        shown=Shown,
        evaluated=evaluated,
    )
    options = {"log_every": None, "accuracy": False}
    launch.train(SimpleNamespace(resume=False, eval_every=3, save_every=None, save=None, **options))
    assert written == [("loss", k / 2, k) for k in range(1, 6)]
    order = [line for line in log if not line.startswith(("copy", "wait"))]
    assert order == ["step 1", "step 2", "read 1", "step 3", "read 2", "read 3", "step 4", "step 5", "read 4", "read 5"]
    printed = ["  ".join(line.split("  ")[:2]) for line in capsys.readouterr().out.splitlines()]
    expected = [f"step {k}  loss {k / 2:.6f}" for k in range(1, 6)]
    assert printed == [*expected[:3], "step 3  evaluation 7.000000", *expected[3:], "step 5  evaluation 7.000000"]
