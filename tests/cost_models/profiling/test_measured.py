"""Layers timed on this machine: what is timed, what it is between the batches, and what is priced by it."""

from __future__ import annotations

import random
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import splitc
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.this_machine import device_name
from splitc.cost_models.compute.flops import layer_costs
from splitc.cost_models.compute.roofline import backward_seconds, forward_seconds, layer_seconds
from splitc.cost_models.profiling import measured
from splitc.cost_models.profiling.measured import MeasuredLine
from splitc.cost_models.profiling.node_cache import node_keys
from splitc.cost_models.profiling.random_run import random_inputs, real_root
from splitc.errors import CostError
from splitc.ir.cluster import Cluster, Device, Unlike
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.report import as_json, report
from tests.support.capturing import capture
from tests.support.command import NET
from tests.support.command import splitc as command
from tests.support.measuring import captured, lines_of, pretend
from tests.support.models import CASES, Case, Made, labels, made, vectors
from tests.support.sampling import sampled
from tests.support.small_programs import place, separable, small_cluster

CPU = torch.device("cpu")


# -- between the batches -----------------------------------------------------------------------------------------------


def line(forward: tuple[float, ...], batches: tuple[int, ...], flop_rate: float = 1e9) -> MeasuredLine:
    small, large = (
        LayerCost(
            n, (OpCost("mm", "matmul", False, 5.0 * n, 2.0 * n), OpCost("mm", "matmul", True, 10.0 * n, 4.0 * n, 2)), n
        )
        for n in (2, 4)
    )
    return MeasuredLine(small, large, batches, forward, forward, flop_rate, "here")


def forward(line: MeasuredLine, batch: int) -> float:
    found = line.at(batch).measured
    assert found is not None and found.forward == found.backward
    return found.forward


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_exact_where_it_was_measured_and_never_falls(seed: int) -> None:
    draw = random.Random(seed)
    batches = tuple(sorted(draw.sample(range(1, 200), draw.randint(1, 6))))
    seconds = tuple(sorted(draw.random() for _ in batches))
    found = line(seconds, batches)
    assert [forward(found, batch) for batch in batches] == pytest.approx(seconds)
    everywhere = [forward(found, batch) for batch in range(1, 400)]
    assert everywhere == sorted(everywhere)
    assert min(everywhere) >= 0


def test_between_two_batches_and_beyond_the_last_ones_the_line_is_straight() -> None:
    found = line((3.0, 4.0, 8.0), (8, 16, 32))
    assert [forward(found, b) for b in (2, 12, 24, 64)] == pytest.approx([2.25, 3.5, 6.0, 16.0])
    assert forward(line((3.0,), (8,)), 32) == pytest.approx(12.0)


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_evened_out_and_what_rises_stays_as_it_is(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.random() for _ in range(6)]
    risen = measured._rising(values)
    assert list(risen) == sorted(risen)
    assert sum(risen) == pytest.approx(sum(values))
    assert measured._rising(sorted(values)) == tuple(sorted(values))


def test_the_counted_cost_stays_beside_the_measured_one() -> None:
    found = line((3.0, 4.0), (8, 16))
    assert replace(found.at(20), measured=None) == CostLine(found.small, found.large).at(20)


def test_a_device_at_another_speed_takes_in_proportion() -> None:
    device = Device("here", {"float32": 4e9, "bfloat16": 9e9}, 1.0, 1.0, {"matmul": 0.5, "memory": 1.0}, 1.0)
    cost = replace(line((3.0, 4.0), (8, 16), flop_rate=1e9).at(8))
    assert forward_seconds(cost, device, "float32") == backward_seconds(cost, device, "float32") == pytest.approx(1.5)
    assert layer_seconds(cost, device, "bfloat16") == pytest.approx(3.0)
    assert layer_seconds(cost, device.scaled(0.25), "float32") == pytest.approx(12.0)


# -- what is timed -----------------------------------------------------------------------------------------------------


@sampled("autocast", [None, torch.bfloat16], everyday=[None])
@sampled("name", CASES, everyday=["encoder"])
@pytest.mark.slow
def test_every_layer_of_every_kind_of_model_is_timed(name: str, autocast: torch.dtype | None, tmp_path: Path) -> None:
    program = captured(name, autocast)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    lines = lines_of(program, tmp_path)
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads
    assert list(lines) == [layer.name for layer in program.layers]
    for layer, found in lines.items():
        assert found.batches == (2, 4)
        assert found.device == device_name()
        assert 0 < found.forward[0] <= found.forward[1] < 10
        assert (found.backward[1] > 0) == (layer not in program.frozen_layers), layer


@pytest.mark.slow
def test_the_layers_take_together_what_a_step_takes(tmp_path: Path) -> None:
    wide = Case(lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), vectors(512))
    model, example, target = wide.model(), torch.randn(64, 512), torch.randn(64, 512)
    lines = lines_of(capture(model, example, target, F.mse_loss), tmp_path, 2.0)
    steps = []
    for _ in range(20):
        begin = time.thread_time()
        F.mse_loss(model(example), target).backward()
        steps.append(time.thread_time() - begin)
    took = sum(m.forward + m.backward for m in (found.at(64).measured for found in lines.values()) if m is not None)
    assert 0.5 < took / statistics.median(steps) < 2


@pytest.mark.slow
def test_a_wide_layer_takes_longer_than_a_narrow_one_and_a_larger_batch_longer_than_a_small_one(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8))
    program = capture(model, torch.randn(64, 8), torch.randn(64, 8), F.mse_loss)
    lines = lines_of(program, tmp_path, 2.0)
    for way in ("forward", "backward"):
        wide, narrow = getattr(lines["1"].at(64).measured, way), getattr(lines["0"].at(64).measured, way)
        assert wide > 3 * narrow
        assert getattr(lines["1"].at(256).measured, way) > 1.5 * wide


def test_real_tensors_are_tied_as_the_model_ties_them_and_the_program_keeps_its_fake_ones() -> None:
    program = captured("language_model")
    root = real_root(program, CPU)
    assert root.get_parameter("lm_head.weight") is root.get_parameter("wte.weight")
    for name, holding in program.tensors.items():
        real = {**dict(root.named_parameters()), **dict(root.named_buffers())}[name]
        assert (type(real) is FakeTensor, tuple(real.shape), real.dtype) == (False, holding.shape, holding.dtype)
    assert all(isinstance(parameter, FakeTensor) for parameter in program.root.parameters())
    assert int(random_inputs(program, 50, CPU)["idx"].max()) < 11


def test_constants_keep_their_numbers_and_are_copies_that_the_graph_may_change() -> None:
    table = torch.arange(8.0)
    root = real_root(
        captured(Case(lambda: made(lambda m, x: m.fc(m.a(x) + table)), vectors(), labels(), F.cross_entropy)), CPU
    )
    assert torch.equal(root.get_buffer("table"), table)
    root.get_buffer("table").add_(1)
    assert table[0] == 0


def test_a_model_that_random_numbers_break_is_refused_by_the_line_that_breaks(tmp_path: Path) -> None:
    model = Made(lambda m, x: m.fc(m.table(x.long()).mean(1)), table=nn.Embedding(3, 8), fc=nn.Linear(8, 5))
    program = captured(Case(lambda: model, lambda: torch.zeros(4, 6), labels(), F.cross_entropy))
    with pytest.raises(CostError, match=r"Made cannot be measured: table \(test_measured.py:\d+\) fails.*counted"):
        lines_of(program, tmp_path)


def test_memory_bounds_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured("mlp")
    counted, held = layer_costs(program), sum(2 * h.nbytes for h in program.tensors.values())
    need = {batch: held + sum(cost.at(batch).saved_bytes for cost in counted.values()) for batch in (4, 8)}
    pretend(monkeypatch)
    monkeypatch.setattr(measured, "free_memory", lambda where: 2 * need[8] - 1)
    assert {found.batches for found in lines_of(program, tmp_path, 1e9).values()} == {(2, 4)}
    monkeypatch.setattr(measured, "free_memory", lambda where: float(held))
    with pytest.raises(CostError, match=r"Sequential cannot be measured here: a step of 2 examples needs .*counted"):
        lines_of(program, tmp_path / "other")


def test_time_bounds_the_batches_the_same_way_when_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, bench = captured("mlp"), pretend(monkeypatch, 1.0, 0.0)
    step = 3 * len(node_keys(program, 4))  # seconds for each example
    budget = (2 + 4 + 8) * 5 * step + 1.0
    assert {found.batches for found in lines_of(program, tmp_path, budget).values()} == {(2, 4, 8)}
    lines_of(program, tmp_path, budget)
    assert bench.runs == [2, 4, 8]
    assert {found.batches for found in lines_of(program, tmp_path, 1e9).values()} == {(2, 4, 8, 16)}
    assert bench.runs == [2, 4, 8, 16]


# -- what is priced by it ----------------------------------------------------------------------------------------------


def here(**others: Any) -> Cluster:
    """A cluster of devices that have this machine's name."""
    cluster = small_cluster(**others)
    return replace(cluster, device=replace(cluster.device, name=device_name()))


def program_of(cluster: Any, **options: Any) -> CompiledProgram:
    model, example, target, loss = CASES["mlp"].make()
    compiled = splitc.compile(model, 2, example, target, loss, cluster=cluster, **options)
    assert isinstance(compiled, CompiledProgram)
    return compiled


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("own_cache")
def test_a_compiled_program_is_priced_by_what_was_measured_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pretend(monkeypatch, 1e-3, 0.0, 2e6)  # the device below multiplies with 1e6 FLOP/s: it takes twice as long
    program = program_of(here(), costs="measured", strategy="data_parallel").program
    assert bench.runs == [2, 4, 8, 16]
    assert program.plan.prediction.layer_seconds == pytest.approx(
        {"0": 4e-3 * 3 * 2 * 2, "2": 4e-3 * 3 * 2 * 2, "4": 0.048}
    )
    assert "\n\nLayer times were measured on this machine.\n" in report(program)
    assert as_json(program)["costs"] == "measured"
    counted = program_of(here(), strategy="data_parallel").program
    assert "were measured" not in report(counted)
    assert as_json(counted)["costs"] == "counted"


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_what_has_a_plan_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pretend(monkeypatch)
    program = program_of(here(), costs="measured")
    runs = list(bench.runs)
    assert program.verify(dtype=torch.float64, steps=1).holds
    again = program_of(here(), costs="measured", plan=program.plan)
    assert (again.plan, bench.runs) == (program.plan, runs)


@pytest.mark.parametrize("unlike", [False, True])
def test_devices_of_another_kind_are_refused_before_anything_is_measured(
    unlike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pretend(monkeypatch)
    cluster = small_cluster()
    if unlike:
        cluster = here(unlike=(Unlike((1,), cluster.device, cluster.link),))
    with pytest.raises(CostError, match=rf"{re.escape(device_name())}, and cluster toy has toy, .*--costs counted"):
        program_of(cluster, costs="measured")
    assert bench.runs == []


def test_a_measured_program_cannot_be_placed_on_devices_of_another_kind() -> None:
    program = separable()
    lines = {name: replace(line((1.0,), (4,)), small=c.small, large=c.large) for name, c in program.costs.items()}
    measured_program = replace(program, costs=lines)
    assert place(measured_program, cluster=here(), world=2).step_seconds > 0
    with pytest.raises(CostError, match="cluster toy has toy"):
        place(measured_program, world=2)


def test_another_word_for_costs_is_an_error() -> None:
    with pytest.raises(CostError, match=r"costs='guessed': there are \"counted\" .* and \"measured\""):
        program_of(small_cluster(), costs="guessed")


def test_the_commands_take_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    done = command(capsys, "inspect net.py --world 2 --costs measured")
    assert (done.code, "cluster v100-10gbe has Tesla V100" in done.err) == (2, True)
    done = command(capsys, "verify net.py --world 2 --costs guessed")
    assert (done.code, "unknown --costs 'guessed'" in done.err) == (2, True)
    assert command(capsys, "compile net.py --world 2 --costs counted -o build").code == 0
    done = command(capsys, "compile net.py --plan build/plan.json --costs measured -o again")
    assert (done.code, "leave out --costs" in done.err) == (2, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_a_gpu_is_timed_by_its_stream(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8))
    lines = lines_of(capture(model, torch.randn(4096, 4096), torch.randn(4096, 8), F.mse_loss), tmp_path)
    wide, narrow = (lines[name].at(4096).measured for name in ("0", "2"))
    assert wide is not None and narrow is not None
    assert wide.forward > 2 * narrow.forward
    assert 0.2 < wide.flop_rate * wide.forward / (2 * 4096**3) < 5
