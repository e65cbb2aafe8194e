"""A model that did not change is validated once in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError, SplitcError
from splitc.ir.program import Program
from splitc.passes import analysis
from splitc.passes.place import Place
from splitc.runtime.launch.loader import of_rank_0
from splitc.runtime.transport.base import Transport
from splitc.specialise import Settings, specialise
from tests.support.ranks import on_ranks, sgd

SCALE = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.held = nn.Linear(4, 8), nn.Linear(8, 5), None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.body(x))) * SCALE


IMAGES, LABELS = torch.linspace(0, 1, 24).reshape(6, 4), torch.arange(6) % 5


def compiled(
    model: nn.Module, world: int = 2, strategy: str = "data_parallel", cluster: str = "v100-10gbe"
) -> CompiledProgram:
    program = splitc.compile(model, world, IMAGES, LABELS, F.cross_entropy, cluster=cluster, strategy=strategy)
    assert isinstance(program, CompiledProgram)
    return program


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What of an analysis was run."""
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path))
    names: list[str] = []

    def counting(name: str) -> Callable[..., object]:
        real = getattr(analysis, name)

        def run(*args: object) -> object:
            names.append(name)
            return real(*args)

        return run

    for name in ("capture", "validate_capture"):
        monkeypatch.setattr(analysis, name, counting(name))
    return names


@pytest.mark.slow
def test_another_strategy_or_world_of_the_same_model_validates_nothing(calls: list[str]) -> None:
    net = Net()
    first = compiled(net)
    assert compiled(net, 3).plan.world == 3 and compiled(net, 2, "layer_separation").plan.strategy == "layer_separation"
    assert calls == ["capture", "validate_capture", "capture", "capture"]
    assert compiled(net).files == first.files and compiled(net).verify().holds


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda net, patch: net.register_buffer("later", torch.zeros(1)),
        lambda net, patch: patch.setitem(globals(), "SCALE", 3.0),
        lambda net, patch: patch.setattr("splitc.ir.disk_cache._versions", lambda: "another version"),
    ],
    ids=["buffer", "global", "versions"],
)
def test_a_changed_model_is_analysed_and_validated_anew(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, pytest.MonkeyPatch], object]
) -> None:
    net = Net()
    compiled(net)
    change(net, monkeypatch)
    compiled(net)
    assert calls == ["capture", "validate_capture"] * 2


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens)).transpose(0, 1).flatten(0, 1)


@pytest.mark.slow
def test_a_program_by_an_earlier_validation_is_the_same_in_every_field(calls: list[str]) -> None:
    tokens = torch.arange(24).reshape(6, 4) % 11

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.t().flatten())

    net = Sequences()
    examples = [Example.bind(net, tokens, tokens, loss) for _ in range(2)]
    first, second = (analysis.analyse(net, example, evaluation=False) for example in examples)
    assert calls.count("validate_capture") == 1 and first.flattened
    for each in fields(Program):
        if each.name not in ("graph", "root", "outputs"):
            assert getattr(first, each.name) == getattr(second, each.name), each.name


@pytest.mark.parametrize(("field", "value"), [("notes", ("validated on the example itself",)), ("in_batch", "head")])
def test_a_validation_that_found_something_else_is_not_kept(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    real = getattr(analysis, "validate_capture")  # noqa: B009
    monkeypatch.setattr(analysis, "validate_capture", lambda *args: replace(real(*args), **{field: value}))
    net = Net()
    for _ in range(2):
        analysis.analyse(net, Example.bind(net, IMAGES, LABELS, F.cross_entropy), evaluation=False)
    assert calls.count("validate_capture") == 2


@pytest.mark.parametrize(("rank", "world", "analysed"), [(0, 2, 1), (1, 2, 0), (1, 3, 1)])
def test_of_ranks_that_were_started_together_only_rank_0_analyses_before_the_program_is_read(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, rank: int, world: int, analysed: int
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    program = compiled(Net())
    assert calls.count("capture") == analysed
    assert program.plan.world == 2 and program.plan.strategy == "data_parallel"
    assert calls.count("capture") == 1


def test_the_worker_of_another_rank_takes_files_and_weights_from_rank_0(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(Net())
    waiting = CompiledProgram(lambda: pytest.fail("analysed"), program._model, program._example, program._settings)
    transports = threading.local()
    monkeypatch.setattr("splitc.compiled.join", lambda *_: transports.own)

    def run(transport: Transport) -> float:
        transports.own = transport
        worker = (program if transport.rank == 0 else waiting).worker(sgd)
        return float(worker.step(IMAGES, LABELS))

    losses = on_ranks(2, run)
    assert losses[0] == losses[1]


def test_an_error_of_rank_0_in_making_the_worker_is_raised_on_every_rank() -> None:
    def fail() -> tuple[dict[str, str], list[dict[str, Tensor]]]:
        raise PlacementError("no plan")

    def run(transport: Transport) -> str:
        with pytest.raises(SplitcError, match="no plan") as caught:
            of_rank_0(transport, fail)
        return str(caught.value)

    assert on_ranks(2, run) == ["no plan", "rank 0 could not compile the program: PlacementError: no plan"]


@pytest.mark.slow
def test_a_second_model_of_the_same_code_is_planned_by_what_was_kept(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(Net(), 2, "auto", "a100-nvlink-200ib")
    assert first.plan.prediction.proof == "optimal", "a plan with a gap is not kept"
    monkeypatch.setattr(Place, "_plan", lambda self, request: pytest.fail("searched for a plan"))
    second = compiled(Net(), 2, "auto", "a100-nvlink-200ib")
    assert first.plan == second.plan and first.plan.candidates == second.plan.candidates
    assert first.files == second.files


@pytest.mark.slow
def test_progress_names_what_is_running(calls: list[str]) -> None:
    steps: list[str] = []
    example = Example.bind(Net(), IMAGES, LABELS, F.cross_entropy)
    program = analysis.analyse(Net(), example, now=lambda what: steps.append(f"{what} {len(calls)}"))
    assert steps == ["tracing 0", "validating 1", "tracing the evaluation of 2", "counting the layers of 2"]
    steps.clear()
    settings = Settings(2, cluster="v100-10gbe")
    plan = specialise(program, settings, now=steps.append).plan
    assert steps == ["writing programs for", "simulating"], "its memory was measured when it was chosen"
    specialise(program, settings, plan, now=steps.append)
    assert steps[2:] == ["writing programs for", "simulating", "measuring the memory of"]
